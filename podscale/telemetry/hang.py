"""How long a rank waits for an update before it calls it a hang: learned from the updates there were."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from podscale.telemetry.catalogue import CATALOGUE

TIMES = 10.0
"""So often as long as an update takes, but for the slowest in a hundred, is no longer a matter of noise."""
LEAST_UPDATES = 10
RECENT = 256


class HangLimit:
    """`most` seconds until some updates are known, then `TIMES` their 99th percentile between `least` and `most`.

    Times are added by one thread, the limit is read by others, about once a second.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = min(least, most), most
        self._recent: list[float] = []
        self._added = 0

    def add(self, seconds: float) -> None:
        """An update took `seconds`."""
        if len(self._recent) < RECENT:
            self._recent.append(seconds)
        else:
            self._recent[self._added % RECENT] = seconds
        self._added += 1

    @property
    def seconds(self) -> float:
        """The limit of this moment."""
        recent = sorted(self._recent)
        if len(recent) < LEAST_UPDATES:
            return self._most
        return min(self._most, max(self._least, TIMES * recent[(len(recent) - 1) * 99 // 100]))


class HangMetrics(Collector):
    """Exports the limit of a rank; registers itself with `registry`."""

    def __init__(self, registry: CollectorRegistry, limit: HangLimit, *, rank: int, run: str) -> None:
        self._limit, self._labels = limit, [run, str(rank)]
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = CATALOGUE["train_hang_limit_seconds"].family()
        family.add_metric(self._labels, self._limit.seconds)  # type: ignore[attr-defined]
        yield family

    def describe(self) -> list[Metric]:
        """Nothing: names are known when collected, and registration must not collect."""
        return []
