"""How long a compiled step takes: what the compiler's cost model says, and bounds by the peaks of the chip."""

from dataclasses import asdict, dataclass
from typing import Any

from podscale.hardware import Topology

MATMUL_PASSES = {"fp32": 6}
"""Products of bf16 that one of a TPU's exact fp32 products takes (XLA's precision HIGHEST; a 3 x 3 convolution compiled
so by libtpu 0.0.42.1 has 5.2 times the cycles on v5e and 5.6 on v3); 1 for other precisions. XLA's count of operations
knows nothing of it."""


@dataclass(frozen=True)
class StepBounds:
    """Seconds that a step takes at least, one reason at a time.

    compute: floating-point operations at the peak rate. memory: bytes that operations read and write, as if nothing
    stayed on the chip between them. links: what a chip sends to its neighbours, over all its links at once; where it
    has two devices, what these send each other counts as well, so that this is up to twice too much. network: what it
    sends between slices; 0 where its rate is not known.
    """

    compute: float
    memory: float
    links: float
    network: float

    @property
    def binding(self) -> str:
        """The largest."""
        values = asdict(self)
        return max(values, key=lambda name: values[name])

    @property
    def seconds(self) -> float:
        """Of a step that does everything at once."""
        return float(max(asdict(self).values()))


@dataclass(frozen=True)
class DeviceWork:
    """Of one device and step. sent, bytes_between_slices: bytes to other devices of the slice, and to other slices."""

    flops: float
    bytes: float
    bytes_sent: float
    bytes_between_slices: float


def compute_bounds(work: DeviceWork, topology: Topology, precision: str) -> StepBounds:
    """The bounds of a device's work; devices of a chip share what it has."""
    chip = topology.chip

    def share(rate: float) -> float:
        return rate / chip.devices

    return StepBounds(
        compute=work.flops * MATMUL_PASSES.get(precision, 1) / share(chip.bf16_tflops * 1e12),
        memory=work.bytes / share(chip.memory_bandwidth * 1e9),
        links=work.bytes_sent / share(chip.link_bandwidth * 1e9),
        network=work.bytes_between_slices / share(chip.network_bandwidth * 1e9) if chip.network_bandwidth else 0.0,
    )


def estimate_step_seconds(cost_model: float | None, bounds: StepBounds) -> tuple[float, str]:
    """Seconds of a step, and where they are from: `cost model`, or `roofline` where the model's cannot be.

    It cannot be negative, and no step is faster than its arithmetic at the peak rate. (Its other bounds count as too
    high what stays on the chip, and what is overlapped: they do not tell a wrong estimate from a right one.)
    """
    if cost_model is not None and cost_model > bounds.compute > 0:
        return cost_model, "cost model"
    return bounds.seconds, "roofline"


def step_rates(seconds: float, global_batch: int, work: DeviceWork, topology: Topology) -> dict[str, Any]:
    """What a step of so many seconds means: images/s of all devices, and the share of the peak that it uses."""
    peak = topology.chip.bf16_tflops * 1e12 / topology.chip.devices
    return {"images_per_second": global_batch / seconds, "peak_share": work.flops / seconds / peak}
