"""The launcher imports the worker before it forks the ranks: that must not touch the driver, which no fork survives."""

from pathlib import Path

from tests.paper_gpu.stub import run_code

CODE = """
import os
from podscale.launch.worker_main import preload_module
preload_module("podscale.pytorch.worker")
print(os.path.exists(os.environ["PAPER_CALLS"]))
import torch
torch.cuda.device_count()
print(os.path.exists(os.environ["PAPER_CALLS"]))
"""


def test_the_driver_is_first_used_after_the_fork(stub: dict[str, str], tmp_path: Path) -> None:
    """The count of devices shows that the stub reports calls."""
    done = run_code(stub, CODE, PAPER_CALLS=str(tmp_path / "calls"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]
