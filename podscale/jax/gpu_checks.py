"""GPU of each process, and checks at the start: one GPU for each process, which JAX can use, of one kind in a run.

Nothing here imports JAX: a worker imports it once all processes agree on their configuration.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from podscale.distributed.rank_group import RankGroup
from podscale.distributed.waits import BARRIER, waiting_for
from podscale.distributed.worker_env import RankEnv
from podscale.errors import InputError
from podscale.util import host_info
from podscale.util.formatting import format_ranks

log = logging.getLogger(__name__)


def device_kind() -> str:
    """Return the kind of this process's devices: `tpu`, `cuda` or `cpu`."""
    if platform := os.environ.get("JAX_PLATFORMS", "").partition(",")[0]:
        return "cuda" if platform == "gpu" else platform  # JAX takes both names
    return "tpu" if host_info.tpu_chips() else "cuda" if host_info.visible_gpus() else "cpu"


def choose_gpus(rank_group: RankGroup, rank_env: RankEnv) -> list[int] | None:
    """Return the numbers of this process's GPUs among the visible ones, for `jax.distributed.initialize`.

    None stands for all devices: for the only process of a node, and without GPUs. Every process of the node must call
    this. Raises InputError if two of them would use the same GPU.
    """
    names = host_info.visible_gpu_names() if device_kind() == "cuda" else []
    if not names or rank_env.local_world_size == 1:
        return None
    if names[0].startswith("MIG-"):
        names = names[:1]  # CUDA shows a process one slice
    # A launcher that sets CUDA_VISIBLE_DEVICES for each process leaves one visible GPU, with number 0.
    number = rank_env.local_rank % len(names)
    _check_own_gpu(rank_group, rank_env, names[number])
    return [number]


@waiting_for(BARRIER)
def _check_own_gpu(rank_group: RankGroup, rank_env: RankEnv, name: str) -> None:
    """Compare the names of the node's GPUs through the store. NCCL would fail later, without the ranks."""
    first, store = rank_env.rank - rank_env.local_rank, rank_group.store
    ranks = range(first, first + rank_env.local_world_size)
    keys = [f"gpu/{rank}" for rank in ranks]
    store.set(f"gpu/{rank_env.rank}", name)
    store.wait(keys, rank_group.timeout_seconds)
    shared = [rank for rank, other in zip(ranks, store.get(keys), strict=True) if other == name]
    if len(shared) > 1:
        raise InputError(
            f"{format_ranks(shared)} use the same GPU ({name} in CUDA_VISIBLE_DEVICES), which NCCL does not connect",
            field="launch.processes",
            got=rank_env.local_world_size,
            hint="Start one process for each GPU, or one for all GPUs of a node, and check CUDA_VISIBLE_DEVICES if it "
            "is set for each rank.",
        )


def describe_gpus(devices: Sequence[Any]) -> str:
    """Return number and name of a process's GPUs, for errors; "" for other devices."""
    gpus = [device for device in devices if device.platform == "gpu"]
    return ", ".join(f"GPU {device.local_hardware_id}, {device.device_kind}" for device in gpus)


def check_gpus(kind: str, devices: Sequence[Any], rank: int) -> None:
    """Raise InputError if there are GPUs that JAX does not use; rank 0 warns if the run's GPUs differ.

    Args:
        kind: kind of the devices that are expected, of `device_kind`.
        devices: JAX's devices of all processes.
    """
    if kind != "cuda":
        return
    if any(device.platform == "cpu" for device in devices):
        reason = f"driver {host_info.nvidia_driver() or 'unknown'}"
        raise InputError(
            f"JAX can use none of the visible GPUs ({reason}), and would train on the CPU",
            field="CUDA_VISIBLE_DEVICES",
            got=",".join(host_info.visible_gpu_names()),
            hint="Run `podscale doctor` on this node, or set CUDA_VISIBLE_DEVICES to an empty value to train on CPUs.",
        )
    ranks: dict[str, list[int]] = defaultdict(list)
    for device in devices:
        if device.process_index not in ranks[device.device_kind]:
            ranks[device.device_kind].append(device.process_index)
    if len(ranks) > 1 and rank == 0:
        listed = "; ".join(f"{name}: {format_ranks(sorted(found))}" for name, found in ranks.items())
        log.warning(f"the ranks have different GPUs, and every step waits for the slowest ({listed})")
