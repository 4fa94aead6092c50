"""Failure of a rank's GPU during training: classification of CUDA's errors, and the error that users see.

CUDA reports a failed GPU or kernel by the next call that waits for it, on the failed rank only, and every later call of
the process fails too. Its peers wait in a collective until they read this rank's exit from its heartbeat.
"""

import os
import re
import socket
from dataclasses import dataclass

from podscale.errors import GpuFailed

HARDWARE_ERRORS = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "invalid access of peer gpu memory over nvlink or a hardware error",
    "hardware stack error",
    "device(s) is/are busy or unavailable",
    "no cuda-capable device is detected",
    "cuda error: unknown error",
    "cuda_error_unknown",
    "gpu is lost",
)
"""Parts of CUDA's texts for errors that a program does not cause once it trains, in lower case."""
KERNEL_ERRORS = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "unspecified launch failure",
    "launch timed out and was terminated",
)
"""Parts of CUDA's texts for a kernel that was aborted, by an error in its code or by the GPU, in lower case."""

RUNBOOK = "docs/runbooks/PodscaleGPUXid.md"


@dataclass(frozen=True)
class GpuFailure:
    """Line of CUDA's error, and whether the text excludes an error in a kernel."""

    reason: str
    by_hardware: bool


def find_gpu_failure(text: str) -> GpuFailure | None:
    """Return the first GPU failure that a text of CUDA, PyTorch, NCCL or XLA reports; None if there is none."""
    for line in text.splitlines():
        lowered = line.lower()
        if "cuda" not in lowered:
            continue
        for phrases in (HARDWARE_ERRORS, KERNEL_ERRORS):
            if any(phrase in lowered for phrase in phrases):
                return GpuFailure(_without_prefix(line), phrases is HARDWARE_ERRORS)
    return None


def gpu_failure_of(error: BaseException) -> GpuFailure | None:
    """Return the GPU failure that an engine's exception reports; None for other errors, memory that runs out included.

    Both engines raise RuntimeError: torch.AcceleratorError and JaxRuntimeError are subclasses.
    """
    return find_gpu_failure(str(error)) if isinstance(error, RuntimeError) else None


def gpu_failed(failure: GpuFailure, rank: str, gpu: str, position: str) -> GpuFailed:
    """Return the error of a rank whose GPU failed.

    Args:
        rank: rank and size, such as `rank 3 of 8`.
        gpu: number, name and PCI address of the GPU; "" if unknown.
        position: phase and step of the rank.
    """
    process = f"process {os.getpid()} on {socket.gethostname()}"
    what = "the GPU failed" if failure.by_hardware else "the GPU aborted a kernel"
    return GpuFailed(
        f"{rank}: {what} ({gpu or 'GPU unknown'}; {process}) in {position}\n{failure.reason}\n{_advice(failure)}"
    )


def _advice(failure: GpuFailure) -> str:
    look = (
        f"Look for Xid at this time in `dmesg` of the host, or in DCGM's metrics: {RUNBOOK} says what each code means."
    )
    if failure.by_hardware:
        cause = "Take the host out of service before the next launch if the code is one of the hardware."
    else:
        cause = (
            "With Xid 13, 31, 43 or 45, or none, the kernel is likely wrong: its Python stack is in the rank's log, "
            "exact with CUDA_LAUNCH_BLOCKING=1. Other codes are the GPU's."
        )
    return f"{look} {cause} The newest checkpoint is kept: start the same command again."


def _without_prefix(line: str) -> str:
    """Return the line from CUDA's error on, without the time and source file of a log line."""
    found = re.search(r"CUDA error|CUDA_ERROR|Cuda failure", line)
    return (line[found.start() :] if found else line).strip()
