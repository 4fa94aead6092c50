"""How much of a node each pod asks for."""

import math
from dataclasses import dataclass

from podscale.config import RunConfig
from podscale.config.preflight import shared_memory_bytes
from podscale.hardware import Hardware

GIB = 2**30
TEMPORARY_GIB = 8.0
"""For /tmp (compiled kernels, torchrun's files) and what the container prints, unless the document says otherwise."""
MIN_SHM_GIB = 1.0
"""Above what the loaders need: NCCL and the driver keep buffers there (a container's own 64 MiB are too few)."""
GPUDIRECT_SHM_GIB = 128.0
"""What xpk mounts for GPUDirect (src/xpk/core/workload_decorators/tcpxo_decorator.py)."""
REPORT_CPUS, REPORT_MEMORY_GIB = 4.0, 16.0
"""A report is written by one process: it takes no more than this of what the document asks for each pod."""


@dataclass(frozen=True)
class PodResources:
    """What one pod asks for, in cores and GiB; 0 asks for nothing. shm is part of memory, cache of the local disk."""

    cpus: float
    memory_gib: float
    shm_gib: float
    temporary_gib: float
    cache_gib: float
    resource: str | None = None
    accelerators: int = 0

    @property
    def ephemeral_gib(self) -> float:
        """GiB of the node's disk."""
        return self.temporary_gib + self.cache_gib


def pod_resources(
    config: RunConfig, stage: str, hardware: Hardware, processes: int, *, cached: bool, gpudirect: bool
) -> PodResources:
    """What the document says, else the hardware's share. cached: shards are copied to the node's disk."""
    resources = config.launch.resources
    cpus, memory = resources.cpus or hardware.cpus_to_request, resources.memory_gib or hardware.memory_gib_to_request
    if stage == "report":
        cpus, memory = min(cpus, REPORT_CPUS), min(memory, REPORT_MEMORY_GIB)
    return PodResources(
        cpus=cpus,
        memory_gib=memory,
        shm_gib=resources.shm_gib or _shm_gib(config, stage, processes, memory, gpudirect=gpudirect),
        temporary_gib=resources.ephemeral_gib or TEMPORARY_GIB,
        cache_gib=math.ceil(config.input.cache_bytes / GIB) if cached else 0.0,
        resource=hardware.resource,
        accelerators=hardware.accelerators,
    )


def _shm_gib(config: RunConfig, stage: str, processes: int, memory: float, *, gpudirect: bool) -> float:
    """Twice what the batches in flight take (they are copied while new ones are made), and room for NCCL."""
    if stage not in ("train", "evaluate"):
        return MIN_SHM_GIB if not memory else min(MIN_SHM_GIB, memory / 2)
    needed = math.ceil(2 * shared_memory_bytes(config, processes) / GIB) + MIN_SHM_GIB
    return max(needed, min(GPUDIRECT_SHM_GIB, memory / 2)) if gpudirect else needed
