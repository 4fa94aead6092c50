"""NVIDIA GPUs on Google Cloud: machine types, their contents and GKE labels, and peak rates.

Sources, read in 2026: accelerator labels, machine types and their GPUDirect of xpk (AI-Hypercomputer/xpk,
src/xpk/core/system_characteristics.py at 367c838); vCPUs and memory of a2 and a3-highgpu by the SkyPilot catalogue
(skypilot-org/skypilot-catalog, catalogs/v8/gcp/vms.csv); the protocol of a machine type by google/dranet
(pkg/cloudprovider/gce). Recalled, not read again: everything about g2 and n1, vCPUs and memory of a3-mega, a3-ultra and
a4, and Local SSD.

Peaks are dense matrix arithmetic in TFLOP/s (a multiply-add counts as 2), without structured sparsity, at the boost
clock of the part named; memory in GB/s. They are NVIDIA's data sheets' as commonly quoted, not read again for this
table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GpuChip:
    """One accelerator: peaks in TFLOP/s, 0 if not offered. fp32 is without TF32 (see pytorch.precision)."""

    name: str
    fp32: float
    fp16: float
    bf16: float
    memory_bandwidth: float

    def peak_tflops(self, precision: str) -> float:
        """Return the TFLOP/s of a policy of the run document (`train.precision`); 0 if it is not offered."""
        return {"fp32": self.fp32, "fp16": self.fp16}.get(precision, self.bf16)


GPU_CHIPS = (
    GpuChip("B200", 75.0, 2250.0, 2250.0, 8000.0),
    GpuChip("H200", 66.9, 989.4, 989.4, 4800.0),
    GpuChip("H100 PCIe", 51.2, 756.0, 756.0, 2000.0),
    GpuChip("H100", 66.9, 989.4, 989.4, 3350.0),
    GpuChip("A100", 19.5, 312.0, 312.0, 2039.0),
    GpuChip("L40S", 91.6, 362.0, 362.0, 864.0),
    GpuChip("L4", 30.3, 121.0, 121.0, 300.0),
    GpuChip("V100", 15.7, 125.0, 0.0, 900.0),
    GpuChip("T4", 8.1, 65.0, 0.0, 320.0),
    GpuChip("P100", 10.6, 21.2, 0.0, 732.0),
    GpuChip("P40", 11.8, 0.0, 0.0, 346.0),
)
"""More specific names first. The A100's bandwidth is the 80 GB part's; V100, P100: SXM2."""


def find_gpu_chip(device: str) -> GpuChip | None:
    """Return the chip of a device's name, as the driver reports it; None if it is not in the table."""
    words = device.replace("-", " ").split()
    return next((chip for chip in GPU_CHIPS if all(word in words for word in chip.name.split())), None)


GpuDirect = Literal["tcpx", "tcpxo", "rdma"]


@dataclass(frozen=True)
class GpuMachine:
    """One machine type; memory and Local SSD in GiB."""

    name: str
    gpus: int
    cpus: int
    memory_gib: float
    local_ssd_gib: int = 0


@dataclass(frozen=True)
class GpuKind:
    """One GPU.

    Args:
        gke_label: value of the node label cloud.google.com/gke-accelerator.
        gpudirect: network protocol that bypasses host memory, on the largest machine; None if there is none.
    """

    name: str
    gke_label: str
    machines: tuple[GpuMachine, ...]
    gpudirect: GpuDirect | None = None

    @property
    def gpus_per_machine(self) -> tuple[int, ...]:
        return tuple(machine.gpus for machine in self.machines)


def _machine_family(
    name: str, counts: Sequence[int], cpus: int, memory: float, local_ssd: int = 0
) -> tuple[GpuMachine, ...]:
    """Return the machine types of a family whose vCPUs, memory and Local SSD are proportional to its GPUs."""
    return tuple(GpuMachine(name.format(gpus=n, cpus=n * cpus), n, n * cpus, n * memory, n * local_ssd) for n in counts)


GPU_KINDS = (
    # Older GPUs attach to general machines of any size; the sizes here are our choice.
    GpuKind("nvidia-t4", "nvidia-tesla-t4", _machine_family("n1-standard-{cpus}", (1, 2, 4), 8, 30)),
    GpuKind("nvidia-l4", "nvidia-l4", _machine_family("g2-standard-{cpus}", (1, 2, 4, 8), 12, 48, 375)),
    GpuKind(
        "nvidia-a100-40gb",
        "nvidia-tesla-a100",
        (*_machine_family("a2-highgpu-{gpus}g", (1, 2, 4, 8), 12, 85), GpuMachine("a2-megagpu-16g", 16, 96, 1360)),
    ),
    GpuKind("nvidia-a100-80gb", "nvidia-a100-80gb", _machine_family("a2-ultragpu-{gpus}g", (1, 2, 4, 8), 12, 170, 375)),
    GpuKind(
        "nvidia-h100-80gb",
        "nvidia-h100-80gb",
        _machine_family("a3-highgpu-{gpus}g", (1, 2, 4, 8), 26, 234, 750),
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
"""Oldest first. If several machines have the same number of GPUs, the one that xpk uses."""


def find_gpu_kind(name: str) -> GpuKind | None:
    """Return the kind of a name or node label; None if there is none."""
    return next((kind for kind in GPU_KINDS if name in (kind.name, kind.gke_label)), None)
