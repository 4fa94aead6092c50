"""Metrics of one process of a server, as in the catalogue."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from podscale.telemetry.catalogue import CATALOGUE
from podscale.telemetry.registry import MetricRegistry

SECONDS_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COUNTERS = (
    "serve_requests",
    "serve_images",
    "serve_batch_failures",
    "serve_connections_closed",
)


class ServingMetrics:
    """Counters and histograms of a process, in `registry`. Each number has one writing thread."""

    def __init__(self, registry: CollectorRegistry, *, model: str, process: int) -> None:
        self._values = MetricRegistry(model=model, process=str(process))
        self._values.declare(*COUNTERS)
        labels = self._values.common_label_values
        self.request_seconds = Histogram("serve_request_duration_seconds", SECONDS_BUCKETS, labels)
        self.batch_images = Histogram("serve_batch_images", BATCH_BUCKETS, labels)
        self.batch_seconds = Histogram("serve_batch_duration_seconds", SECONDS_BUCKETS, labels)
        registry.register(self)

    def count_request(self, code: int, seconds: float) -> None:
        self._values.add("serve_requests", 1, str(code))
        self.request_seconds.observe(seconds)

    def count_images(self, images: int) -> None:
        self._values.add("serve_images", images)

    def count_image_failure(self, reason: str) -> None:
        self._values.add("serve_image_failures", 1, reason)

    def count_batch(self, images: int, seconds: float) -> None:
        self.batch_images.observe(images)
        self.batch_seconds.observe(seconds)

    def count_batch_failure(self) -> None:
        self._values.add("serve_batch_failures")

    def count_closed_connection(self, cause: str) -> None:
        self._values.add("serve_connections_closed", 1, cause)

    def set_model_info(self, weights: str, version: str) -> None:
        self._values.set_info("serve_model_info", {"weights": weights, "version": version})

    def watch(self, name: str, value: Callable[[], float]) -> None:
        """Set a gauge to `value()` at each collection."""
        self._values.on_collect(lambda: self._values.set(name, value()))

    def collect(self) -> Iterator[Metric]:
        yield from self._values.collect()
        for histogram in (self.request_seconds, self.batch_images, self.batch_seconds):
            yield histogram.family()

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration does not collect."""
        return []


class Histogram:
    """Histogram with upper bounds `bounds`, of a metric in the catalogue."""

    def __init__(self, name: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        self._name, self._bounds, self._labels = name, bounds, labels
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> Metric:
        cumulative, total = [], 0
        for bound, count in zip((*(f"{bound:g}" for bound in self._bounds), "+Inf"), list(self._counts), strict=True):
            total += count
            cumulative.append((bound, total))
        family: Any = CATALOGUE[self._name].family()
        family.add_metric(self._labels, cumulative, self._sum)
        assert isinstance(family, Metric)
        return family
