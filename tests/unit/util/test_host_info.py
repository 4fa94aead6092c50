"""Devices and memory of a machine, found without importing a framework."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from podscale.util import host_info


def test_visible_gpus_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(host_info, "Path", lambda path: tmp_path if path == "/dev" else Path(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert host_info.visible_gpus() == host_info.default_processes_per_node() == 2
    counts = {"": 0, "1": 1, "0,1,2": 2, "0,-1,1": 1, "-1": 0, "GPU-a": 1, "MIG-a,MIG-b,MIG-c": 3}
    for value, expected in counts.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert host_info.visible_gpus() == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert host_info.default_processes_per_node() == 1


def test_cores_follow_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert host_info.cpu_count() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= host_info.cpu_count() <= len(before)


def test_the_supervisor_imports_no_framework() -> None:
    code = "import sys, podscale.launch.supervisor, podscale.runs.checkpoint; "
    code += "print([m for m in ('torch', 'kfp', 'sklearn', 'rich') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:24:45 UTC 2025", "580.65.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.172.08  Release Build  (x)", "570.172.08"),
        ("NVRM version: something else", ""),
    ],
)
def test_the_driver_is_read_from_the_kernel_module(tmp_path: Path, line: str, version: str) -> None:
    (tmp_path / "version").write_text(f"{line}\nGCC version: gcc 12.2.0\n")
    assert host_info.nvidia_driver(tmp_path / "version") == version
    assert host_info.nvidia_driver(tmp_path / "none") == ""


def test_a_driver_must_be_as_new_as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver, cuda, fits in (
        ("580.65.06", "13.2", True),
        ("575.57.08", "13.2", False),
        ("575.57.08", "12.8", True),
        ("470.1", "12.8", False),
        ("470.1", "", True),
        ("", "13.2", True),
    ):
        monkeypatch.setattr(host_info, "nvidia_driver", lambda driver=driver: driver)
        assert (host_info.driver_problem(cuda) == "") == fits, (driver, cuda)


def test_what_triton_lacks_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host_info.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert len(host_info.missing_for_triton()) == 2
    for name in ("gcc", "triton-cc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert host_info.missing_for_triton() == [str(tmp_path / "Python.h")]
    monkeypatch.setenv("CC", "triton-cc")  # the GPU image's, which needs no headers
    assert host_info.missing_for_triton() == []
    monkeypatch.delenv("CC")
    (tmp_path / "Python.h").touch()
    assert host_info.missing_for_triton() == []
