"""The launcher imports the worker before it forks the ranks: that must not touch the driver, which no fork survives."""

from pathlib import Path

import pytest

from tests.paper_gpu.stub import run_code

PRELOAD = "from podscale.launch.fork_launcher import preload_module\npreload_module('podscale.pytorch.worker')\n"


@pytest.mark.parametrize(("then", "touches"), [("", False), ("import torch; torch.cuda.device_count()", True)])
def test_the_driver_is_first_used_after_the_fork(
    stub: dict[str, str], tmp_path: Path, then: str, touches: bool
) -> None:
    """The second case shows that the stub reports a call."""
    code = PRELOAD + then
    done = run_code(stub, code, PAPER_CALLS=str(tmp_path / "calls"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").exists() == touches
