"""Device of a rank, and checks at the start: a usable driver, a GPU that the build supports, one GPU for each rank."""

import logging
import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from podscale.config import TrainSection
from podscale.distributed.waits import BARRIER, waiting_for
from podscale.errors import InputError
from podscale.util import env, host_info
from podscale.util.formatting import format_ranks

log = logging.getLogger(__name__)

BF16_CAPABILITY = (8, 0)
"""First compute capability whose tensor cores and libraries compute in bf16 (Ampere)."""


def choose_device(environ: Mapping[str, str] = os.environ) -> torch.device:
    """Return this rank's device: the GPU of its local rank, or the CPU if there is no GPU.

    A launcher that sets CUDA_VISIBLE_DEVICES for each rank leaves one visible GPU, with number 0. So local ranks are
    counted modulo the visible GPUs; `check_one_rank_per_gpu` finds ranks that share a GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", _local_rank(environ) % torch.cuda.device_count())


def check_device(name: str) -> None:
    """Raise InputError if torch does not see the device, such as `cuda:0`."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError("not a device", field="--device", got=name, hint="Give cpu, cuda or cuda:0.") from None
    if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()):
        return
    raise InputError(
        "torch sees no such device here",
        field="--device",
        got=name,
        hint="`podscale doctor` checks the driver. `--device cpu` measures batches in the host's memory.",
    )


def _local_rank(environ: Mapping[str, str]) -> int:
    return env.read_number(env.LOCAL_RANK, environ) or 0


def check_gpu(train: TrainSection, environ: Mapping[str, str] = os.environ) -> None:
    """Raise InputError if there is a GPU that this rank cannot use, or not for `train.precision`."""
    if torch.version.cuda is None:
        return
    device = choose_device(environ)
    if device.type == "cpu":
        _check_no_gpu_is_lost(torch.version.cuda)
        return
    if _local_rank(environ) == (gpus := torch.cuda.device_count()):  # one message for each node
        log.info(f"local ranks from {gpus} on use GPUs from number 0 on: each rank sees {gpus}")
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    version = ".".join(map(str, capability))
    oldest = min(map(_architecture_number, torch.cuda.get_arch_list()), default=0)
    if 10 * capability[0] + capability[1] < oldest:
        raise InputError(
            f"this GPU is too old (compute capability {version}): PyTorch {torch.__version__} has kernels from "
            f"{oldest // 10}.{oldest % 10} on",
            field="CUDA_VISIBLE_DEVICES",
            got=name,
            hint="Use a newer GPU, or a build of PyTorch for an older CUDA.",
        )
    if train.precision.startswith("bf16") and capability < BF16_CAPABILITY:
        raise InputError(
            f"this GPU computes no bf16 ({name}, compute capability {version}; bf16 needs 8.0)",
            field="train.precision",
            got=train.precision,
            hint="Set train.precision=fp16 or fp32, or use a newer GPU.",
        )


def _check_no_gpu_is_lost(cuda: str) -> None:
    """Raise InputError if GPUs are visible and PyTorch finds none: training on the CPU would take many times longer."""
    if gpus := host_info.visible_gpus():
        reason = host_info.driver_problem(cuda) or f"driver {host_info.nvidia_driver() or 'unknown'}"
        raise InputError(
            f"PyTorch for CUDA {cuda} can use none of the visible GPUs ({reason})",
            field="CUDA_VISIBLE_DEVICES",
            got=os.environ.get("CUDA_VISIBLE_DEVICES", f"all {gpus} GPUs"),
            hint="Run `podscale doctor` on this node, or set CUDA_VISIBLE_DEVICES to an empty value to train on CPUs.",
        )


def _architecture_number(architecture: str) -> int:
    """Return the number of "sm_90" or "compute_90a"."""
    return int(architecture.partition("_")[2].rstrip("af"))


class GpuIdentity(NamedTuple):
    """GPU of a rank. MIG slices of one GPU have its PCI address."""

    host: str
    pci_address: tuple[int, int, int]
    name: str


def gpu_identity(device: torch.device) -> GpuIdentity:
    properties: Any = torch.cuda.get_device_properties(device)  # its stubs lack the address on PCI
    numbers = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return GpuIdentity(socket.gethostname(), numbers, properties.name)


def describe_gpu(device: torch.device) -> str:
    """Return number, name and PCI address of a GPU, as in the driver's log of Xid errors; "" for a CPU."""
    if device.type == "cpu":
        return ""
    identity = gpu_identity(device)
    domain, bus, number = identity.pci_address
    return f"{device}, {identity.name}, PCI:{domain:04x}:{bus:02x}:{number:02x}"


@waiting_for(BARRIER)
def check_one_rank_per_gpu(device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """Raise InputError on every rank if two ranks share a GPU. Every rank must call this at the same time."""
    gathered: list[GpuIdentity | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, gpu_identity(device))
    # Benchmarks on one GPU set a host name for each rank, as NCCL demands of ranks that share a GPU.
    kinds = compare_identities([identity for identity in gathered if identity], may_share="NCCL_HOSTID" in environ)
    if len(kinds) > 1 and dist.get_rank() == 0:
        listed = "; ".join(f"{name}: {format_ranks(ranks)}" for name, ranks in kinds.items())
        log.warning(f"the ranks have different GPUs, and every step waits for the slowest ({listed})")


def compare_identities(identities: Sequence[GpuIdentity], *, may_share: bool) -> dict[str, list[int]]:
    """Return the ranks of each kind of GPU, by name. Raises InputError if ranks share a GPU and must not.

    Args:
        identities: GPU of each rank.
    """
    ranks_by_gpu: dict[tuple[str, tuple[int, int, int]], list[int]] = defaultdict(list)
    ranks_by_name: dict[str, list[int]] = defaultdict(list)
    for rank, identity in enumerate(identities):
        ranks_by_gpu[identity.host, identity.pci_address].append(rank)
        ranks_by_name[identity.name].append(rank)
    shared = [ranks for ranks in ranks_by_gpu.values() if len(ranks) > 1]
    if shared and not may_share:
        raise InputError(
            f"{format_ranks(shared[0])} use the same GPU, or MIG slices of one GPU, which NCCL does not connect",
            field="launch.processes",
            got=len(identities),
            hint="Start one rank for each GPU, which is the default of launch.processes, and check "
            "CUDA_VISIBLE_DEVICES if it is set for each rank.",
        )
    return dict(ranks_by_name)
