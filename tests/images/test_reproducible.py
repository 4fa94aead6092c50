"""A second build of an image from the same commit has identical files."""

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.containers import Engine

ROOT = Path(__file__).resolve().parents[2]


class FileProperties(NamedTuple):
    """Compared properties of a file, folder or link: type and permissions, owner, time, and hash of the content."""

    mode: str
    owner: tuple[int, int]
    seconds: int
    content: str


@pytest.mark.timeout(3600)
def test_two_builds_have_the_same_files(engine: Engine, image: str, name: str):
    """The second build reuses no layer of the first: packages are installed, built and compiled again."""
    if "PODSCALE_TEST_BUILDS" not in os.environ:
        pytest.skip("builds an image again, for minutes and with the package index; set PODSCALE_TEST_BUILDS=1")
    labels = engine.inspect(image)["Labels"]
    state = subprocess.check_output(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], cwd=ROOT, text=True
    )
    if labels["org.opencontainers.image.revision"] != state.strip():
        pytest.skip(f"{image} is of another commit than this checkout: make images IMAGES={name}")
    variables = {"TAG": "again", "CACHE": "no", "BASE_IMAGE": labels["org.opencontainers.image.base.name"]}
    subprocess.run([ROOT / "images/build.sh", name], check=True, env={**os.environ, **engine.variables, **variables})
    second = f"{image.rpartition(':')[0]}:again"
    try:
        before, after = entries(engine, image), entries(engine, second)
        paths = before.keys() | after.keys()
        assert len(paths) > 1000
        assert {
            path: (before.get(path), after.get(path)) for path in paths if before.get(path) != after.get(path)
        } == {}
        assert engine.inspect(second)["Config"] == engine.inspect(image)["Config"]
    finally:
        engine("image", "rm", "--force", second, check=False)


def entries(engine: Engine, image: str) -> dict[str, FileProperties]:
    """Return the entries of an image by path."""
    with engine.mounted(image) as root:
        return {str(path.relative_to(root)): entry(path) for path in walk(root)}


def walk(folder: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder):
        yield from (Path(directory, name) for name in (*folders, *files))


def entry(path: Path) -> FileProperties:
    stat_result, content = path.lstat(), ""
    if stat.S_ISLNK(stat_result.st_mode):
        content = str(path.readlink())
    elif stat.S_ISREG(stat_result.st_mode):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    return FileProperties(
        stat.filemode(stat_result.st_mode), (stat_result.st_uid, stat_result.st_gid), int(stat_result.st_mtime), content
    )
