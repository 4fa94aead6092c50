"""What machines and accelerators there are: peaks, machine types, shapes, and the names a cluster knows them by."""

from podscale.hardware.chips import GPU_CHIPS, GpuChip, find_gpu_chip
from podscale.hardware.choose import CPU, Hardware, find_hardware, hardware_names
from podscale.hardware.gpus import GPU_KINDS, GpuKind, GpuMachine
from podscale.hardware.tpu_chips import TPU_CHIPS, Topology, TpuChip, find_topology
from podscale.hardware.tpus import TPU_KINDS, TpuKind, chip_count

__all__ = [
    "CPU",
    "GPU_CHIPS",
    "GPU_KINDS",
    "TPU_CHIPS",
    "TPU_KINDS",
    "GpuChip",
    "GpuKind",
    "GpuMachine",
    "Hardware",
    "Topology",
    "TpuChip",
    "TpuKind",
    "chip_count",
    "find_gpu_chip",
    "find_hardware",
    "find_topology",
    "hardware_names",
]
