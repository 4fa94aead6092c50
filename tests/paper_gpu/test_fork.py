"""The launcher imports the worker before it forks the ranks: that must not touch the driver, which no fork survives."""

from pathlib import Path

import pytest

from tests.paper_gpu.stub import run_code

CODE = """
import os
from podscale.launch.worker_main import preload_module
preload_module("{worker}")
print(os.path.exists(os.environ["PAPER_CALLS"]))
import torch
torch.cuda.device_count()
print(os.path.exists(os.environ["PAPER_CALLS"]))
"""


def check_preloading(stub: dict[str, str], directory: Path, worker: str) -> None:
    """Import a worker as the launcher does. The count of devices shows that the stub reports calls."""
    done = run_code(stub, CODE.format(worker=worker), PAPER_CALLS=str(directory / "calls"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]


def test_the_driver_is_first_used_after_the_fork(stub: dict[str, str], tmp_path: Path) -> None:
    check_preloading(stub, tmp_path, "podscale.pytorch.worker")


@pytest.mark.usefixtures("whole_matrix")
def test_the_driver_is_first_used_after_the_fork_of_jax(stub: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("jax")
    check_preloading(stub, tmp_path, "podscale.jax.worker")
