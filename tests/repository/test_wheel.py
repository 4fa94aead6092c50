"""Files of a release: they are complete, and the wheel runs the embedded digits outside of the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from podscale.evaluation.evaluation_json import read_evaluation
from podscale.version import RELEASE
from tests.support.shard_set import encode_image, smooth_pixels
from tools import distribution

ROOT = Path(__file__).resolve().parents[2]
INSTALL_PAGE = ROOT / "docs" / "how-to" / "install.md"
CONTRIBUTORS_EXTRAS = {"dev", "docs"}
SOURCES = {"podscale": "podscale", "components": "podscale/components", "pipelines": "podscale/pipelines"}
"""Folders of the repository whose files are in the wheel, with their folder there."""
GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the checkout as a git repository of one commit, the release."""
    source = tmp_path_factory.mktemp("release") / "source"
    shutil.copytree(ROOT, source, ignore=_not_source)
    commit(source, tag=f"v{RELEASE}")
    return source


@pytest.fixture(scope="module")
def dist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files of the release."""
    folder = tmp_path_factory.mktemp("dist")
    distribution.build(folder, source)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("podscale-*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(f"podscale-{RELEASE}.dist-info/METADATA"))


@pytest.fixture(scope="module")
def wheel_environment(dist: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory bin of a new environment with the wheel, its extras, and the dependencies of this environment."""
    environment = tmp_path_factory.mktemp("wheel") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    # A .pth file adds the directory of the dependencies without reading the .pth files in it: the editable install of
    # the checkout stays invisible, so what runs is the wheel alone.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *_shared_site_directories()}
    (Path(site.strip()) / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    # pip finds the requirements of these extras installed, or fails, since it has no index.
    extras = "torch,timm,hub,cluster,containers"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index"]
    subprocess.run([*install, "--find-links", str(dist), f"podscale[{extras}]=={RELEASE}"], check=True)
    return environment / "bin"


def _not_source(folder: str, names: list[str]) -> set[str]:
    """Return the entries of a checkout that are not source; runs/ and datasets/ are products only at its top."""
    kept = {".gitignore", ".gitattributes", ".git_archival.txt"}
    hidden = {name for name in names if name.startswith(".") or name.endswith((".egg-info", ".so"))} - kept
    hidden |= {"__pycache__", "target"} & set(names)
    return hidden | ({"runs", "datasets", "build", "dist", "site"} if Path(folder) == ROOT else set())


def _shared_site_directories() -> set[str]:
    return {path for path in sys.path if path.endswith("site-packages")}


def commit(folder: Path, tag: str | None = None) -> None:
    """Commit the files of a folder, and tag the commit."""
    subprocess.run([*GIT, "init", "-q", str(folder)], check=True)
    subprocess.run([*GIT, "-C", str(folder), "add", "-A"], check=True)
    subprocess.run([*GIT, "-C", str(folder), "commit", "-q", "--allow-empty", "-m", "c"], check=True)
    if tag is not None:
        subprocess.run([*GIT, "-C", str(folder), "tag", tag], check=True)


def outside(tmp_path: Path, *command: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run a command in an empty folder, without the checkout on Python's path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_wheel_has_every_data_file_and_nothing_else(source: Path, wheel: Path) -> None:
    expected = {
        f"{target}/{path.relative_to(source / folder)}"
        for folder, target in SOURCES.items()
        for path in (source / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    dashboards = (source / "charts" / "podscale" / "dashboards").glob("*.*")
    expected |= {f"podscale/dashboards/{path.name}" for path in dashboards}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected | {"podscale/_build_version.py"}
    assert {"podscale/config/schema.json", "podscale/pipelines/presets/digits.yaml"} < found


def test_the_source_distribution_has_the_package_and_the_chart(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in names}
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "PKG-INFO"} < tops
    assert {"charts/podscale/Chart.yaml", "charts/podscale/templates/NOTES.txt"} < names
    assert {"native/Cargo.toml", "native/Cargo.lock", "native/src/lib.rs"} < names
    assert not tops & {"tests", "docs", "benchmarks", "tools", "images", "requirements", "runs", ".venv"}


def test_the_extras_are_those_that_are_documented(metadata: Message) -> None:
    rows = re.findall(r"^\| `podscale\[(\w+(?:-\w+)*)\]` \|", INSTALL_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(metadata.get_all("Provides-Extra", [])) - CONTRIBUTORS_EXTRAS == set(rows)
    assert len(rows) == len(set(rows))


def test_the_wheel_installs_with_its_extras_and_has_its_version(wheel_environment: Path, tmp_path: Path) -> None:
    where = outside(
        tmp_path, wheel_environment / "python", "-c", "import podscale.pipelines as p; print(p.__file__)"
    ).stdout
    assert str(wheel_environment.parent) in where
    package = Path(where.strip()).parents[1]
    assert "creativecommons.org/licenses/by/4.0" in next(package.rglob("digits.npz.license")).read_text()
    assert outside(tmp_path, wheel_environment / "podscale", "--version").stdout == f"podscale {RELEASE}\n"


RUN = ("run.id=wheel", "launch.processes=1", "model.width=4", "train.epochs=1", "train.schedule.warmup_epochs=0")


def run_outside(wheel_environment: Path, folder: Path, preset: str, *options: str) -> None:
    """Run a preset by the wheel, with one process and a narrow model."""
    settings = [word for option in (*RUN, *options) for word in ("--set", option)]
    done = outside(folder, wheel_environment / "podscale", "run", preset, *settings)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (folder / "runs" / "wheel" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_wheel_runs_the_digits(wheel_environment: Path, tmp_path: Path) -> None:
    run_outside(wheel_environment, tmp_path, "digits")


@pytest.mark.slow
def test_the_wheel_trains_on_jpegs_without_the_extension(wheel_environment: Path, tmp_path: Path) -> None:
    """The wheel for all machines has no native decoder; the loader reference decodes the JPEGs."""
    for number in range(24):
        path = tmp_path / "photos" / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_image(smooth_pixels(number, 48, 40)))
    code = "from podscale.data import native; print(native.is_installed())"
    assert outside(tmp_path, wheel_environment / "python", "-c", code).stdout == "False\n"
    model = ("model.name=resnet18", "model.stem=small", "input.image_size=32", "train.global_batch=8")
    run_outside(wheel_environment, tmp_path, "imagefolder", "data.source=photos", "launch.threads=1", *model)
    evaluation = read_evaluation(tmp_path / "runs" / "wheel" / "evaluation.json")
    assert evaluation.scores.samples == 4


def test_the_sbom_lists_the_locked_packages_of_the_release(dist: Path) -> None:
    bom = json.loads((dist / f"podscale-{RELEASE}.cdx.json").read_text(encoding="utf-8"))
    root = bom["metadata"]["component"]
    assert (bom["bomFormat"], root["name"], root["version"]) == ("CycloneDX", "podscale", RELEASE)
    locked = re.findall(r"^([\w.-]+)==([^ ]+)", (ROOT / "requirements" / "run.txt").read_text(), re.MULTILINE)
    assert {(component["name"], component["version"]) for component in bom["components"]} == set(locked)
    assert all(component["externalReferences"][0]["hashes"] for component in bom["components"])


def test_the_checksums_name_every_file(dist: Path) -> None:
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist, capture_output=True, check=True)
    assert len(done.stdout.splitlines()) == len(list(dist.iterdir())) - 1 >= 3
