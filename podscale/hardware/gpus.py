"""NVIDIA GPUs as Google Cloud offers them: machine types, what is in them, and what GKE calls them.

Sources, read in 2026: accelerator labels, machine types and their GPUDirect of xpk
(AI-Hypercomputer/xpk, src/xpk/core/system_characteristics.py at 367c838); vCPUs and memory of a2 and a3-highgpu by the
SkyPilot catalogue (skypilot-org/skypilot-catalog, catalogs/v8/gcp/vms.csv); the protocol of a machine type by
google/dranet (pkg/cloudprovider/gce). Recalled, not read again: everything about g2
and n1, vCPUs and memory of a3-mega, a3-ultra and a4, and Local SSD.
"""

from dataclasses import dataclass
from typing import Literal

GpuDirect = Literal["tcpx", "tcpxo", "rdma"]


@dataclass(frozen=True)
class GpuMachine:
    """One machine type; memory and Local SSD in GiB."""

    name: str
    gpus: int
    cpus: int
    memory: float
    local_ssd: int = 0


@dataclass(frozen=True)
class GpuKind:
    """One GPU. label: value of the node label cloud.google.com/gke-accelerator."""

    name: str
    label: str
    machines: tuple[GpuMachine, ...]
    direct: GpuDirect | None = None
    """How GPUs of whole machines reach each other past the host's memory; None = over ordinary TCP alone."""

    @property
    def counts(self) -> tuple[int, ...]:
        """GPUs that a machine may have."""
        return tuple(machine.gpus for machine in self.machines)


def _n1(gpus: int, cpus: int) -> GpuMachine:
    """GPUs of old attach to general machines of any size; the one named here is ours to choose."""
    return GpuMachine(f"n1-standard-{cpus}", gpus, cpus, 3.75 * cpus)


GPUS = (
    GpuKind("nvidia-t4", "nvidia-tesla-t4", (_n1(1, 8), _n1(2, 16), _n1(4, 32))),
    GpuKind(
        "nvidia-l4",
        "nvidia-l4",
        (
            GpuMachine("g2-standard-12", 1, 12, 48, 375),
            GpuMachine("g2-standard-24", 2, 24, 96, 750),
            GpuMachine("g2-standard-48", 4, 48, 192, 1500),
            GpuMachine("g2-standard-96", 8, 96, 384, 3000),
        ),
    ),
    GpuKind(
        "nvidia-a100-40gb",
        "nvidia-tesla-a100",
        (
            GpuMachine("a2-highgpu-1g", 1, 12, 85),
            GpuMachine("a2-highgpu-2g", 2, 24, 170),
            GpuMachine("a2-highgpu-4g", 4, 48, 340),
            GpuMachine("a2-highgpu-8g", 8, 96, 680),
            GpuMachine("a2-megagpu-16g", 16, 96, 1360),
        ),
    ),
    GpuKind(
        "nvidia-a100-80gb",
        "nvidia-a100-80gb",
        (
            GpuMachine("a2-ultragpu-1g", 1, 12, 170, 375),
            GpuMachine("a2-ultragpu-2g", 2, 24, 340, 750),
            GpuMachine("a2-ultragpu-4g", 4, 48, 680, 1500),
            GpuMachine("a2-ultragpu-8g", 8, 96, 1360, 3000),
        ),
    ),
    GpuKind(
        "nvidia-h100-80gb",
        "nvidia-h100-80gb",
        (
            GpuMachine("a3-highgpu-1g", 1, 26, 234, 750),
            GpuMachine("a3-highgpu-2g", 2, 52, 468, 1500),
            GpuMachine("a3-highgpu-4g", 4, 104, 936, 3000),
            GpuMachine("a3-highgpu-8g", 8, 208, 1872, 6000),
        ),
        "tcpx",
    ),
    GpuKind(
        "nvidia-h100-mega-80gb",
        "nvidia-h100-mega-80gb",
        (GpuMachine("a3-megagpu-8g", 8, 208, 1872, 6000),),
        "tcpxo",
    ),
    GpuKind("nvidia-h200-141gb", "nvidia-h200-141gb", (GpuMachine("a3-ultragpu-8g", 8, 224, 2952, 12000),), "rdma"),
    GpuKind("nvidia-b200", "nvidia-b200", (GpuMachine("a4-highgpu-8g", 8, 224, 3968, 12000),), "rdma"),
)
"""Oldest first. Machines of a kind by their number of GPUs; where several have it, the one that xpk takes."""


def find_gpu(name: str) -> GpuKind | None:
    """The kind of that name or node label; None where there is none."""
    return next((kind for kind in GPUS if name in (kind.name, kind.label)), None)
