"""Wheels with the native decoder: one for each kind of machine, that pip takes on it."""

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from tools import native_wheels

pytestmark = pytest.mark.slow

EXTENSION = "podscale/data/_native.abi3.so"
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""Number of each machine in the header of its programs."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if find_spec("ziglang") is None:
        pytest.skip("not installed: ziglang; make .venv/.wheels")
    if missing := native_wheels.missing_targets():
        pytest.skip(f"no Rust for {' and '.join(missing)}: rustup target add {' '.join(missing)}")
    return native_wheels.build(tmp_path_factory.mktemp("dist"))


def test_each_has_the_extension_of_its_machine(wheels: list[Path]) -> None:
    assert len(wheels) == len(ELF_MACHINES)
    for wheel, machine in zip(wheels, native_wheels.MACHINES, strict=True):
        assert parse_wheel_filename(wheel.name)[3] == {Tag("cp311", "abi3", f"manylinux_2_28_{machine}")}
        with zipfile.ZipFile(wheel) as archive:
            header = archive.read(EXTENSION)[:20]
        assert header[:4] == b"\x7fELF"
        assert int.from_bytes(header[18:20], "little") == ELF_MACHINES[machine]


def test_the_one_of_this_machine_decodes(wheels: list[Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(tmp_path)
    script = "from podscale.data import native; print(native.__file__, native.is_available())"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == [str(tmp_path / "podscale/data/native.py"), "True"]
