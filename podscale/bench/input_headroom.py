"""Headroom of an input pipeline: the rate that a host delivers, compared with the rate that its training takes."""

from dataclasses import dataclass

from podscale.util.formatting import join_words

CORE_RATES = {
    ("native", True): ((10.4, 4547.0), (110.1, 1406.0)),
    ("native", False): ((10.4, 4145.0), (110.1, 960.0)),
    ("reference", False): ((10.4, 1301.0), (110.1, 416.0)),
}
"""kB of a JPEG and images per CPU-second at 224 px, by loader and decode index; benchmarks/results/input.md."""
RATED_CORE = "an Intel Xeon of 2.3 GHz at 224 px"
"""Core and image size of `CORE_RATES`."""


@dataclass(frozen=True)
class Headroom:
    """Rate of one loader on a host, images/s and images per CPU-second, beside the need in images/s."""

    per_second: float
    per_core: float
    needed: float
    cores: int

    @property
    def ratio(self) -> float:
        """Delivered rate over the need; 1 or more is enough."""
        return self.per_second / self.needed

    @property
    def missing(self) -> float:
        """Images/s that the host is short of; 0 if it delivers enough."""
        return max(0.0, self.needed - self.per_second)

    @property
    def cores_needed(self) -> float:
        """Cores of this kind that deliver the need."""
        return self.needed / self.per_core

    @property
    def verdict(self) -> str:
        """Ratio in words, with the images/s that are missing."""
        if self.ratio >= 1:
            return f"headroom {format_times(self.ratio)} times"
        return f"{format_times(self.ratio)} times the need, the host is short of {format_rate(self.missing)} images/s"

    def __str__(self) -> str:
        rates = f"{format_rate(self.per_second)} images/s in all, {format_rate(self.per_core)} per core"
        return f"{rates}: {self.verdict}. {self._cores}"

    @property
    def _cores(self) -> str:
        needed = format_cores(self.cores_needed)
        if self.cores_needed > self.cores:
            return f"The need takes {needed} cores like these, and the host has {self.cores}."
        condition = "" if self.ratio >= 1 else ", if no other work takes their time"
        return f"The need takes {needed} of the {self.cores} cores{condition}."


def remedies(*, has_index: bool, has_extension: bool) -> str:
    """Return what raises the rate of the CPU loaders, without what is there; PodscaleDataStarved names the same."""
    changes = ["more cores or input.workers"]
    if not has_extension:
        changes.append("the native extension (`podscale doctor`)")
    if not has_index:
        changes.append("a decode index (`podscale shard RUN --decode-index`)")
    return join_words([*changes, "input.decoded_cache_bytes", "a smaller data.resize_short"], "or")


def expected_core_rate(kilobytes: float, loader: str, *, has_index: bool) -> float:
    """Return the images per CPU-second of a CPU loader for JPEGs of this mean size, between measured ones.

    The time of an image is taken as linear in its bytes.
    """
    (small, fast), (large, slow) = CORE_RATES[loader, has_index and loader == "native"]
    seconds_per_kilobyte = (1 / slow - 1 / fast) / (large - small)
    return 1 / (1 / fast + (max(kilobytes, small / 2) - small) * seconds_per_kilobyte)


def format_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def format_times(ratio: float) -> str:
    """Format a `ratio`: 1.666 -> '1.67', 16.66 -> '16.7'."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}" if ratio >= 10 else f"{ratio:.2f}"


def format_cores(number: float) -> str:
    """Format a `number` of cores: 6.04 -> '6.0'."""
    return f"{number:,.1f}" if number >= 0.1 else "less than 0.1"
