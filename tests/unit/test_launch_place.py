"""What a machine offers, and that looking does not import a framework."""

import os
import subprocess
import sys

import pytest

from podscale.launch.place import core_count, gpu_count


@pytest.mark.parametrize(("visible", "count"), [("0,2,3", 3), ("", 0), ("-1", 0), ("GPU-a", 1)])
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == count


def test_cores_follow_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert core_count() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= core_count() <= len(before)


def test_the_supervisor_imports_no_framework() -> None:
    code = "import sys, podscale.launch.supervisor, podscale.checkpoint; "
    code += "print([m for m in ('torch', 'kfp', 'sklearn', 'rich') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
