"""The installed wheel is complete: it runs the embedded digits outside of the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory bin of a new environment with the wheel and the dependencies of this environment."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    shutil.copytree(ROOT, source, ignore=_not_source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(place),
        str(source),
    ]
    # Without the native extension, as on a machine without cargo: its build would take half a minute.
    subprocess.run(build, check=True, env={**os.environ, "CARGO": "no-cargo"})
    wheel = next(place.glob("podscale-*.whl"))
    environment = place / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    # A .pth file adds the directory of the dependencies without reading the .pth files in it: the editable install of
    # the checkout stays invisible, so what runs is the wheel alone.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *_shared_site_directories()}
    (Path(site.strip()) / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    return environment / "bin"


def _not_source(folder: str, names: list[str]) -> set[str]:
    """Return the entries of a checkout that are not source; runs/ and datasets/ are products only at its top."""
    hidden = {name for name in names if name.startswith(".") or name.endswith((".egg-info", ".so"))}
    hidden |= {"__pycache__", "target"} & set(names)
    return hidden | ({"runs", "datasets", "build"} if Path(folder) == ROOT else set())


def _shared_site_directories() -> set[str]:
    return {path for path in sys.path if path.endswith("site-packages")}


def test_the_wheel_runs_the_digits(wheel_environment: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    where = subprocess.check_output(
        [wheel_environment / "python", "-c", "import podscale.pipelines; print(podscale.pipelines.__file__)"],
        cwd=tmp_path,
        env=environment,
        text=True,
    )
    assert str(wheel_environment.parent) in where
    package = Path(where.strip()).parents[1]
    assert "creativecommons.org/licenses/by/4.0" in next(package.rglob("digits.npz.license")).read_text()
    options = [
        "run.id=wheel",
        "launch.processes=1",
        "model.width=4",
        "train.epochs=1",
        "train.schedule.warmup_epochs=0",
    ]
    command = [wheel_environment / "podscale", "run", *(word for option in options for word in ("--set", option))]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "runs" / "wheel" / "report.html").stat().st_size > 10_000
