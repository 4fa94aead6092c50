"""A GPU fails while a rank trains: its process exits with one message, and torch's own error is in its log."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from podscale.distributed.worker_exit import read_worker_reports
from podscale.errors import ExitCode
from tests.paper_gpu.stub import ROOT

ECC, ILLEGAL_ADDRESS, ASSERT = 214, 700, 710
UNAVAILABLE, UNKNOWN = 46, 999
"""Values of cudaError_t."""


def run_rank(stub: dict[str, str], directory: Path, **variables: str) -> tuple[int, str, str]:
    """Run a worker on the stub. Returns its exit code, the error of its report, and its output."""
    environment = {
        **{**os.environ, **stub, "PODSCALE_RANK_DIR": str(directory), "PODSCALE_STAGE": "train"},
        **{"PODSCALE_CONFIG": "{}", "PODSCALE_SHARD_SET": "none", "PODSCALE_FENCE": "1", **variables},
    }
    for name in ("PODSCALE_SUPERVISOR", "PODSCALE_LOG_DIR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "podscale.launch.worker_main", "tests.paper_gpu.waiting_rank"]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    report = read_worker_reports(directory)[0]
    assert report.exit_code == ended.returncode, ended.stderr
    return ended.returncode, report.error, ended.stdout + ended.stderr


def check_report(stub: dict[str, str], directory: Path, code: int, reason: str, what: str) -> None:
    """Let the fourth wait of a rank for its GPU fail, and check its exit code, its error and its output."""
    variables = {"PAPER_FAIL_AFTER": "3", "PAPER_FAIL_WITH": str(code), "PAPER_GPUS": "4", "CUDA_VISIBLE_DEVICES": "2"}
    exit_code, error, output = run_rank(stub, directory, **variables)
    assert exit_code == ExitCode.FAILED
    first, second, advice = error.splitlines()
    gpu = "cuda:0, NVIDIA H100 80GB HBM3, PCI:0000:03:00"
    assert first.startswith(f"rank 0 of 1: {what} ({gpu}; process ")
    assert first.endswith(f" on {socket.gethostname()}) in forward_backward of step 4")
    assert second == reason
    assert "Xid" in advice
    assert "docs/runbooks/PodscaleGPUXid.md" in advice
    assert ("CUDA_LAUNCH_BLOCKING" in advice) == (what != "the GPU failed")
    assert "AcceleratorError" in output  # the stack of a kernel that is wrong


@pytest.mark.parametrize(
    ("code", "reason", "what"),
    [
        (ECC, "CUDA error: uncorrectable ECC error encountered", "the GPU failed"),
        (ILLEGAL_ADDRESS, "CUDA error: an illegal memory access was encountered", "the GPU aborted a kernel"),
    ],
)
def test_a_rank_reports_that_its_gpu_failed(
    stub: dict[str, str], tmp_path: Path, code: int, reason: str, what: str
) -> None:
    check_report(stub, tmp_path, code, reason, what)


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (UNKNOWN, "CUDA error: unknown error"),
        (UNAVAILABLE, "CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    ],
)
def test_a_rank_reports_that_its_gpu_fell_off(stub: dict[str, str], tmp_path: Path, code: int, reason: str) -> None:
    """Xid 79: a process that used the GPU gets an unknown error, and a new one finds it unavailable."""
    check_report(stub, tmp_path, code, reason, "the GPU failed")


def test_a_failed_assertion_of_a_kernel_is_a_bug(stub: dict[str, str], tmp_path: Path) -> None:
    """An index out of range, for example: torch's error is left as it is, with its stack."""
    exit_code, error, output = run_rank(stub, tmp_path, PAPER_FAIL_AFTER="0", PAPER_FAIL_WITH=str(ASSERT))
    assert exit_code == ExitCode.FAILED
    assert error.startswith("AcceleratorError: CUDA error: device-side assert triggered")
    assert "Traceback" in output
