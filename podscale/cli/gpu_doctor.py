"""Checks of the GPUs of this machine for `podscale doctor`: settings, memory errors, links, and the JPEG decoder.

Their state and the links between them are those that the driver's program nvidia-smi reports. With two GPUs, NCCL sends
between them, and its log has the paths that it takes.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from podscale.bench.ranks import run_workers
from podscale.pytorch.nccl_paths import NcclPaths, parse_paths
from podscale.util.terminal import CheckResult

INFINIBAND = Path("/sys/class/infiniband")
"""Network cards that reach memory directly (RDMA)."""
PEER_MEMORY = Path("/sys/module/nvidia_peermem")
"""Kernel module by which these cards reach the memory of GPUs."""
DRIVER = Path("/proc/driver/nvidia/version")
OPEN_DRIVER = "Open Kernel Module"
"""Words of the open driver's version, which shares the memory of GPUs without that module (DMA-BUF)."""
NVIDIA_SMI_SECONDS = 30.0
"""Timeout of one call of nvidia-smi, which may hang with a broken driver, seconds."""
NCCL_SECONDS = 120.0
"""Time limit of two ranks that import PyTorch and send once, seconds."""
STATE_FIELDS = (
    "index",
    "persistence_mode",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
)


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


def check_gpus(*, usable: int) -> Iterator[CheckResult]:
    """Check the GPUs that the driver has.

    Args:
        usable: GPUs that PyTorch can use.
    """
    if states := gpu_states():
        yield _check_persistence(states)
        yield _check_memory_errors(states)
        yield _check_mig(states)
    if len(states) > 1:
        yield _check_nvlink(len(states))
    has_cards = bool(states) and any(INFINIBAND.glob("*"))
    if has_cards:
        yield _check_gpudirect()
    if min(usable, len(states)) > 1 and not any(state.mig for state in states):
        yield _check_nccl_path()
        if has_cards:
            yield _check_nccl_network()
    if usable:
        yield _check_jpeg_decoder()


def _check_persistence(states: Sequence[GpuState]) -> CheckResult:
    off = [state.index for state in states if state.persistence is False]
    if not off:
        return CheckResult("persistence", "ok", "the driver stays loaded")
    found = f"off for {_names(off)}: the first process on a GPU loads the driver, which takes seconds"
    return CheckResult("persistence", "note", found, "run nvidia-persistenced on the node, or nvidia-smi -pm 1")


def _check_memory_errors(states: Sequence[GpuState]) -> CheckResult:
    if broken := [state.index for state in states if state.uncorrected]:
        errors = sum(state.uncorrected for state in states)
        found = f"{errors} errors on {_names(broken)} that ECC could not correct: results may be wrong"
        return CheckResult("GPU memory", "missing", found, "drain the node and reset or replace the GPU")
    if off := [state.index for state in states if state.ecc is False]:
        found = f"ECC is off for {_names(off)}: memory errors are not seen"
        return CheckResult("GPU memory", "note", found, "nvidia-smi -e 1, then restart the node")
    has_ecc = all(state.ecc for state in states)
    return CheckResult("GPU memory", "ok", "ECC is on, no uncorrected errors" if has_ecc else "the GPUs have no ECC")


def _check_mig(states: Sequence[GpuState]) -> CheckResult:
    if not (split := [state.index for state in states if state.mig]):
        return CheckResult("MIG", "ok", "off: a rank has a whole GPU")
    found = f"on for {_names(split)}: NCCL takes one slice of a GPU"
    return CheckResult("MIG", "note", found, "one rank a GPU; nvidia-smi -mig 0 joins the slices")


def _check_nvlink(gpus: int) -> CheckResult:
    without = pairs_without_nvlink()
    if not without:
        return CheckResult("NVLink", "ok", f"between all {gpus} GPUs")
    first, second = without[0]
    found = f"not between GPU {first} and GPU {second}" + (f" and {len(without) - 1} other pairs" * (len(without) > 1))
    advice = "measure with podscale bench allreduce; all_reduce.algorithm=torus2d with row= the GPUs that are linked"
    return CheckResult("NVLink", "note", f"{found}: NCCL uses PCIe or sockets there", advice)


def _check_gpudirect() -> CheckResult:
    is_open = DRIVER.exists() and OPEN_DRIVER in DRIVER.read_text(encoding="ascii", errors="replace")
    if PEER_MEMORY.exists() or is_open:
        way = "nvidia_peermem" if PEER_MEMORY.exists() else "DMA-BUF of the open driver"
        return CheckResult("GPUDirect RDMA", "ok", f"by {way}")
    found = "network cards with RDMA are there, but cannot reach the memory of GPUs: NCCL copies through the host"
    return CheckResult("GPUDirect RDMA", "note", found, "modprobe nvidia_peermem on the node, or the open driver")


def _check_nccl_path() -> CheckResult:
    """Check which way NCCL sends between the first two GPUs."""
    paths = _run_nccl()
    if isinstance(paths, str):
        advice = "run it alone for the whole message: podscale bench allreduce --ranks 2"
        return CheckResult("NCCL path", "missing", f"GPU 0 and GPU 1 cannot exchange data: {paths}", advice)
    found = f"GPU 0 to GPU 1 by {', '.join(paths.transports) or 'an unknown path'}"
    if paths.kinds == {"P2P"}:
        link = {"NVL": "NVLink", "": "an unknown link"}.get(paths.link, f"PCIe ({paths.link})")
        return CheckResult("NCCL path", "ok", f"{found}, over {link}")
    advice = "see NCCL_P2P_LEVEL, IOMMU and ACS in NCCL's troubleshooting; in containers one pod or --ipc for all GPUs"
    return CheckResult("NCCL path", "note", f"{found}: data pass through the host's memory", advice)


def _check_nccl_network() -> CheckResult:
    """Check which way NCCL sends to other machines, between two GPUs of this one over its network cards."""
    paths = _run_nccl("network")
    if isinstance(paths, str):
        found, advice = f"NCCL cannot send over the cards: {paths}", "NCCL_IB_HCA names the cards to use"
        return CheckResult("NCCL network", "note", found, advice)
    found = f"by {', '.join(paths.transports) or 'an unknown path'}"
    if paths.transports and all("GDRDMA" in transport for transport in paths.transports):
        return CheckResult("NCCL network", "ok", f"{found}: the cards reach the memory of GPUs")
    if any(transport.startswith("NET/Socket") for transport in paths.transports):
        advice = "install the RDMA libraries (libibverbs) or the cloud's NCCL plugin; see NCCL_IB_HCA, NCCL_IB_DISABLE"
        return CheckResult("NCCL network", "note", f"{found}: NCCL does not use the cards with RDMA", advice)
    advice = "nvidia_peermem or the open driver; NCCL_NET_GDR_LEVEL=SYS if card and GPU are far apart"
    return CheckResult("NCCL network", "note", f"{found}: data pass through the host's memory", advice)


def _run_nccl(*arguments: str) -> NcclPaths | str:
    """Let two ranks send once; return the paths of NCCL's log, or the last line of a failed run."""
    with tempfile.TemporaryDirectory(prefix="podscale-doctor-") as folder:
        log = Path(folder, "log.txt")
        codes = run_workers("podscale.pytorch.nccl_paths", arguments, 2, NCCL_SECONDS, log=log)
        text = log.read_text(encoding="utf-8", errors="replace")
    if codes == [0, 0]:
        return parse_paths(text)
    if None in codes and not any(codes):
        return f"no result within {NCCL_SECONDS:.0f} s"
    lines = [line for line in text.splitlines() if line.strip() and "NCCL INFO" not in line]
    return lines[-1].strip()[:200] if lines else "the ranks ended without a message"


def _check_jpeg_decoder() -> CheckResult:
    from podscale.data.loaders.nvjpeg import is_available_on

    if is_available_on("cuda:0"):
        return CheckResult("nvJPEG", "ok", "torchvision decodes on the GPU (input.loader=nvjpeg)")
    found = "torchvision does not decode on this GPU: images are decoded on the CPU"
    return CheckResult("nvJPEG", "note", found, "install the torchvision of requirements/run.txt, or DALI")


def _names(indices: Sequence[int]) -> str:
    return ", ".join(f"GPU {index}" for index in indices)


def gpu_states() -> list[GpuState]:
    """Return the state of each GPU; empty if nvidia-smi is missing or fails."""
    text = _run_nvidia_smi(["--query-gpu=" + ",".join(STATE_FIELDS), "--format=csv,noheader,nounits"])
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    return [_parse_state(row) for row in rows if len(row) == len(STATE_FIELDS) and row[0].isdigit()]


def pairs_without_nvlink() -> list[tuple[int, int]]:
    """Return the pairs of GPUs that no NVLink connects; empty if there is one GPU, or nvidia-smi fails."""
    return parse_topology(_run_nvidia_smi(["topo", "-m"]))


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


def _run_nvidia_smi(arguments: list[str]) -> str:
    """Return what nvidia-smi prints; "" if it is missing, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
