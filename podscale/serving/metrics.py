"""Metrics of one process of a server, as in the catalogue."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from podscale.telemetry.registry import MetricRegistry

SECONDS_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COUNTERS = ("serve_requests", "serve_images", "serve_batch_failures", "serve_connections_closed")


class ServingMetrics:
    """Counters and histograms of a process, in `registry`. Each number has one writing thread."""

    def __init__(self, registry: CollectorRegistry, *, model: str, process: int) -> None:
        self._values = MetricRegistry(model=model, process=str(process))
        self._values.declare(*COUNTERS)
        self.request_seconds = self._values.histogram("serve_request_duration_seconds", SECONDS_BUCKETS)
        self.batch_images = self._values.histogram("serve_batch_images", BATCH_BUCKETS)
        self.batch_seconds = self._values.histogram("serve_batch_duration_seconds", SECONDS_BUCKETS)
        registry.register(self._values)

    def count_request(self, code: int, seconds: float) -> None:
        self._values.add("serve_requests", 1, str(code))
        self.request_seconds.observe(seconds)

    def count_image(self) -> None:
        self._values.add("serve_images")

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
