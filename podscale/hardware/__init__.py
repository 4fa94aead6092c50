"""Accelerators and machine types: peaks, topologies, and their names on a cluster."""

from podscale.hardware.gpus import GPU_CHIPS, GPU_KINDS, GpuChip, GpuKind, GpuMachine, find_gpu_chip
from podscale.hardware.lookup import CPU, Hardware, find_hardware, hardware_names
from podscale.hardware.tpus import TPU_CHIPS, TPU_KINDS, Topology, TpuChip, TpuKind, chip_count, find_topology

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
