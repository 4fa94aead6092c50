"""Images/s that training takes from the input pipeline of one host: as published, recorded or estimated by FLOP."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from podscale.bench.train_report import REFERENCE_RATES
from podscale.config import RunConfig
from podscale.config.preflight.host import processes_per_node
from podscale.hardware import TPU_CHIPS, find_gpu_chip, find_hardware
from podscale.util import host_info
from podscale.util.formatting import format_count

DEFAULT_CHIP = "H100"
"""Chip whose published rate is scaled for chips without one, and assumed for GPUs that are not in the table."""
RESNET50_FLOPS = 24.3e9
"""FLOP of ResNet-50 for one image of 224 px, forward and backward, as `ModelSpec.training_flops` counts them."""
CORE_TFLOPS = 0.017
"""TFLOP/s of a CPU core in training: 146 images/s of 0.227 GFLOP on two cores (benchmarks/results/imagenette.md)."""


NeedBasis = Literal["given", "published", "estimate", "claim", "recorded"]


@dataclass(frozen=True)
class NeededRate:
    """Images/s that a host or one GPU takes.

    Args:
        source: Source of the number, for readers.
        basis: Kind of the source; `given` is an option of the user.
    """

    per_second: float
    source: str
    basis: NeedBasis = "given"


@dataclass(frozen=True)
class TrainingDevices:
    """Devices with which one host trains a run.

    Args:
        name: Chip; "CPU core" for a host without accelerators.
        tflops: Peak of one device at the run's precision; the TFLOP/s that training reaches for a CPU core.
        bandwidth: Memory bandwidth of one device in GB/s of 16-bit numbers; 0 for a CPU core.
        location: Location of the devices, a phrase for readers.
    """

    name: str
    count: int
    tflops: float
    bandwidth: float
    location: str

    @property
    def is_cpu(self) -> bool:
        return not self.bandwidth

    @property
    def speed(self) -> float:
        """Geometric mean of peak and bandwidth: convolutions are bound by the one, the other layers by the other."""
        return math.sqrt(self.tflops * self.bandwidth)

    def __str__(self) -> str:
        count = format_count(self.count, self.name) if self.is_cpu else f"{self.count} {self.name}"
        return f"{count} {self.location}"


def published_need(gpus: Sequence[str]) -> NeededRate:
    """Return the published rate of ResNet-50 on the first of these GPUs, by default on an H100."""
    chip = find_gpu_chip(gpus[0]) if gpus else None
    name = chip.name if chip is not None and chip.name in REFERENCE_RATES else DEFAULT_CHIP
    rates = REFERENCE_RATES[name]
    return NeededRate(rates.published, f"ResNet-50 at 224 px on one {name}; {rates.source}", "published")


def training_devices(config: RunConfig) -> TrainingDevices:
    """Return the GPUs or TPUs of this host, else those of a host of `launch.hardware`, else the cores of this host."""
    precision, here = config.train.precision, "of this host"
    if gpus := host_info.visible_gpus():
        return _gpus(host_info.gpu_names()[0], min(gpus, processes_per_node(config)), precision, here)
    if chips := host_info.tpu_chips():
        return _tpus(chips[0], len(chips), here)
    hardware = find_hardware(config.launch.hardware) if config.launch.hardware else None
    if hardware is not None and hardware.kind == "gpu":
        return _gpus(hardware.name.upper(), hardware.accelerators, precision, "of launch.hardware")
    if hardware is not None and hardware.kind == "tpu":
        return _tpus(hardware.name.removeprefix("tpu-").partition("-")[0], hardware.accelerators, "of launch.hardware")
    return TrainingDevices("CPU core", host_info.cpu_count(), CORE_TFLOPS, 0.0, here)


def _gpus(name: str, count: int, precision: str, location: str) -> TrainingDevices:
    chip = find_gpu_chip(name)
    if chip is None or not chip.peak_tflops(precision):
        reason = f"assumed: the table has no peak of {name} in {precision}"
        return _gpus(DEFAULT_CHIP, count, precision, f"{location} ({reason})")
    bandwidth = chip.memory_bandwidth / (2 if precision == "fp32" else 1)
    return TrainingDevices(chip.name, count, chip.peak_tflops(precision), bandwidth, location)


def _tpus(name: str, count: int, location: str) -> TrainingDevices:
    chip = next(chip for chip in TPU_CHIPS if chip.name == name)
    return TrainingDevices(f"TPU {name}", count, chip.bf16_tflops, chip.memory_bandwidth, location)


def estimate_need(network: str, flops: float, devices: TrainingDevices) -> NeededRate:
    """Estimate the images/s of a host by the FLOP of an image.

    On accelerators, the published rate of ResNet-50 is scaled by FLOP, and by the geometric mean of peak and memory
    bandwidth. Published rates on 1,024 TPU v3 and 4,096 v4 are within 20 % of that. Small networks reach less.

    Args:
        network: Network and image size, for readers.
        flops: FLOP of one image, forward and backward.
    """
    work = f"{network} ({flops / 1e9:.3g} GFLOP an image, forward and backward) on {devices}"
    if devices.is_cpu:
        rate = devices.count * devices.tflops * 1e12 / flops
        speed = f"at {devices.tflops * 1e3:.0f} GFLOP/s each"
        source = f"estimate for {work} {speed}; it has no GPU or TPU, and launch.hardware names none"
        return NeededRate(rate, source, "estimate")
    reference = devices.name if devices.name in REFERENCE_RATES else DEFAULT_CHIP
    known, base = REFERENCE_RATES[reference], _gpus(reference, 1, "bf16", "")
    rate = devices.count * known.published * RESNET50_FLOPS / flops * devices.speed / base.speed
    basis = f"ResNet-50's {known.published:,.0f} images/s on one {reference} ({known.source})"
    return NeededRate(rate, f"estimate for {work}: {basis}, scaled by FLOP, peak and memory bandwidth", "estimate")


def claimed_need(images_per_second: float, nodes: int, hardware: str | None) -> NeededRate:
    """Return a host's part of a published training throughput, `images_per_second` over all devices."""
    where = f" on {hardware}" if hardware else ""
    hosts = f"over the {format_count(nodes, 'host')} of launch.nodes"
    source = f"claim of the document, {images_per_second:,.0f} images/s{where}, {hosts}"
    return NeededRate(images_per_second / nodes, source, "claim")


def recorded_need(run: str, images_per_second: float, nodes: int, waiting: float) -> NeededRate:
    """Return the need of one host by an earlier run: its rate without the time that it waited for images.

    Args:
        run: Run directory, for readers.
        images_per_second: Rate over all nodes.
        waiting: Fraction of the training time in which the leading rank waited for images.
    """
    rate = images_per_second / nodes / max(1 - waiting, 0.01)
    where = f"{images_per_second:,.0f} images/s on {format_count(nodes, 'node')}"
    source = f"recorded in {run}: {where}, {waiting:.0%} of the time waiting for images"
    return NeededRate(rate, source, "recorded")
