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
