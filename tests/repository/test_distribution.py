"""Versions follow the tags in git, and a release is refused unless the tag, the chart and the changelog agree."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.version import Version

from podscale.version import RELEASE
from tests.repository.test_wheel import GIT, commit
from tools import distribution

ROOT = Path(__file__).resolve().parents[2]
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "podscale/version.py")
NEXT = ".".join(map(str, (*Version(RELEASE).release[:2], Version(RELEASE).micro + 1)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Copy of the files that determine the version, without git."""
    folder = tmp_path / "source"
    for name in (*FILES, "charts/podscale/Chart.yaml", ".gitattributes", ".git_archival.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def built_version(folder: Path) -> str:
    """Return the version, without the commit, of a wheel of this folder."""
    command = [sys.executable, "setup.py", "-q", "--version"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].partition("+")[0]


def test_the_chart_and_the_changelog_are_of_the_release() -> None:
    assert distribution.version_problems() == []


@pytest.mark.parametrize(
    ("tags", "version"),
    [
        (["v0.0.1"], "0.0.1"),
        ([None], f"{RELEASE}.dev1"),
        (["v0.0.9", None, None], f"{RELEASE}.dev2"),
        ([f"v{RELEASE}"], RELEASE),
        ([f"v{RELEASE}", None], f"{NEXT}.dev1"),
    ],
    ids=["an older tag", "no tag", "after an older tag", "the release", "after the release"],
)
def test_the_version_is_that_of_the_tag_or_counts_commits(source: Path, tags: list[str | None], version: str) -> None:
    for tag in tags:
        commit(source, tag)
    assert built_version(source) == version


def test_a_copy_without_git_has_the_release(source: Path) -> None:
    assert built_version(source) == RELEASE


def test_an_archive_of_git_has_the_version_of_its_tag(source: Path, tmp_path: Path) -> None:
    commit(source, "v0.0.7")
    target = tmp_path / "archive"
    target.mkdir()
    with subprocess.Popen([*GIT, "-C", str(source), "archive", "HEAD"], stdout=subprocess.PIPE) as git:
        subprocess.run(["tar", "-x", "-C", str(target)], stdin=git.stdout, check=True)
    assert built_version(target) == "0.0.7"


def test_only_the_dated_tagged_and_clean_commit_is_a_release(source: Path) -> None:
    log = source / "CHANGELOG.md"
    text = log.read_text(encoding="utf-8").replace(f"## [{RELEASE}]", f"## [{RELEASE}] - 2026-12-01", 1)
    log.write_text(text.partition("## [")[0] + f"## [{RELEASE}]\n", encoding="utf-8")
    commit(source)
    undated, untagged = distribution.release_problems(source)[::-1]
    assert f"[{RELEASE}]" in undated
    assert f" v{RELEASE} " in untagged
    log.write_text(f"## [Unreleased]\n\n## [{RELEASE}] - 2026-12-01\n", encoding="utf-8")
    assert "(got 1)" in distribution.release_problems(source)[0]
    commit(source, f"v{RELEASE}")
    assert distribution.release_problems(source) == []
    assert distribution.version_problems(source) == []


def test_a_chart_or_a_changelog_of_another_version_is_found(source: Path) -> None:
    chart, log = source / "charts" / "podscale" / "Chart.yaml", source / "CHANGELOG.md"
    chart.write_text(chart.read_text().replace(f"\nversion: {RELEASE}", "\nversion: 9.9.9"), encoding="utf-8")
    log.write_text("## [Unreleased]\n\n## [9.9.8] - 2026-12-01\n", encoding="utf-8")
    assert distribution.version_problems(source) == [
        f"charts/podscale/Chart.yaml: version is not {RELEASE} (got 9.9.9)",
        f"CHANGELOG.md: its newest release is not {RELEASE} (got 9.9.8)",
    ]


def test_source_distributions_of_other_times_are_equal(tmp_path: Path) -> None:
    archives = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "b").write_text("b")
        (folder / "a").write_text("a")
        path = tmp_path / f"{number}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in ("b", "a")[:: 1 if number == 1 else -1]:
                archive.add(folder / name, arcname=f"x/{name}")
        distribution.set_times(path, 1_000_000_000)
        archives.append(path.read_bytes())
    assert archives[0] == archives[1]
