"""The Prometheus metrics of one rank of an evaluation; in a training they are among TrainMetrics."""

from time import time

from prometheus_client import CollectorRegistry

from podscale.telemetry.readings import MetricRegistry


class EvaluationMetrics:
    """Counts what one rank evaluates; in `registry`."""

    def __init__(self, registry: CollectorRegistry, *, rank: int, run: str) -> None:
        self._readings = MetricRegistry(run=run, rank=str(rank))
        self._readings.begin("eval_images")
        registry.register(self._readings)

    def evaluating(self, images: int) -> None:
        """Counts images of this rank."""
        self._readings.add("eval_images", images)

    def evaluated(self, top1: float, top5: float) -> None:
        """Sets the accuracies that were found, as shares; rank 0 alone knows them."""
        self._readings.set("eval_top1_ratio", top1)
        self._readings.set("eval_top5_ratio", top5)
        self._readings.set("eval_last_timestamp_seconds", time())
