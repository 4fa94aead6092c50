"""State of NVIDIA GPUs and the links between them, as the driver's program nvidia-smi reports it."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

TIMEOUT_SECONDS = 30.0
"""Timeout of one call; with a broken driver nvidia-smi may hang."""
FIELDS = ("index", "persistence_mode", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "mig.mode.current")


@dataclass(frozen=True)
class GpuState:
    """State of one GPU.

    Args:
        index: Number of the GPU.
        persistence: Whether the driver stays loaded without a process; None if unknown.
        ecc: Whether its memory corrects errors; None if it cannot, or is unknown.
        uncorrected: Errors since the driver was loaded that ECC could not correct.
        mig: Whether it is split into MIG slices.
    """

    index: int
    persistence: bool | None
    ecc: bool | None
    uncorrected: int
    mig: bool


def gpu_states() -> list[GpuState]:
    """Return the state of each GPU; empty if nvidia-smi is missing or fails."""
    text = _run(["--query-gpu=" + ",".join(FIELDS), "--format=csv,noheader,nounits"])
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    return [_parse_state(row) for row in rows if len(row) == len(FIELDS) and row[0].isdigit()]


def pairs_without_nvlink() -> list[tuple[int, int]]:
    """Return the pairs of GPUs that no NVLink connects; empty if there is one GPU, or nvidia-smi fails."""
    return parse_topology(_run(["topo", "-m"]))


def parse_topology(text: str) -> list[tuple[int, int]]:
    """Return the pairs of GPUs that no NVLink connects in the matrix of `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    rows = {words[0]: words[1:] for words in lines if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words}
    names = list(rows)
    return [
        (int(names[a][3:]), int(names[b][3:]))
        for a in range(len(names))
        for b in range(a + 1, len(names))
        if b < len(rows[names[a]]) and not rows[names[a]][b].startswith("NV")
    ]


def _parse_state(row: Sequence[str]) -> GpuState:
    index, persistence, ecc, uncorrected, mig = row
    return GpuState(
        int(index),
        _is_enabled(persistence),
        _is_enabled(ecc),
        int(uncorrected) if uncorrected.isdigit() else 0,
        _is_enabled(mig) is True,
    )


def _is_enabled(text: str) -> bool | None:
    return {"enabled": True, "disabled": False}.get(text.lower())


def _run(arguments: list[str]) -> str:
    """Return what nvidia-smi prints; "" if it is missing, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
