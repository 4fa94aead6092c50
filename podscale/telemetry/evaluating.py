"""The Prometheus metrics of one rank of an evaluation; in a training they are among TrainMetrics."""

from time import time

from prometheus_client import CollectorRegistry

from podscale.telemetry.readings import MetricRegistry


class EvaluationMetrics:
    """Counts what one rank evaluates; in `registry`."""

    def __init__(self, registry: CollectorRegistry, *, rank: int, run: str) -> None:
        self._values = MetricRegistry(run=run, rank=str(rank))
        self._values.declare("eval_images")
        registry.register(self._values)

    def count_evaluated_images(self, images: int) -> None:
        """Counts images of this rank."""
        self._values.add("eval_images", images)

    def set_accuracies(self, top1: float, top5: float) -> None:
        """Sets the accuracies that were found, as shares; rank 0 alone knows them."""
        self._values.set("eval_top1_ratio", top1)
        self._values.set("eval_top5_ratio", top5)
        self._values.set("eval_last_timestamp_seconds", time())
