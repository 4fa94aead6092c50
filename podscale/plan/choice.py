"""Which all-reduce, and buckets of which size, for a model's gradients over given links."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from podscale.plan.collectives import ALGORITHMS, Fabric

BUCKET_SIZES_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
MIN_ADVANTAGE = 0.95
"""Another algorithm than the backend's own must promise this share of its time: the model is not the network."""


@dataclass(frozen=True)
class AllReduceChoice:
    """seconds: predicted for all buckets and, once more, the last one, of whose time nothing hides."""

    algorithm: str
    bucket_mb: float
    seconds: float


def choose_all_reduce(fabric: Fabric, gradient_bytes: int, algorithms: Sequence[str]) -> AllReduceChoice:
    """The fastest combination of one of `algorithms` and a size of buckets, by the cost model.

    Many small buckets pay for latency, few large ones leave a long last bucket after backward has ended: what is
    minimised is the time of all buckets plus that of one. Between equals the larger bucket wins.
    """
    candidates = [
        AllReduceChoice(name, bucket, _exposed_seconds(fabric, name, bucket, gradient_bytes))
        for name in algorithms
        for bucket in reversed(BUCKET_SIZES_MB)
    ]
    best = min(candidates, key=_predicted_seconds)
    own = min((choice for choice in candidates if choice.algorithm == "flat"), key=_predicted_seconds, default=best)
    return best if best.seconds <= MIN_ADVANTAGE * own.seconds else own


def _exposed_seconds(fabric: Fabric, algorithm: str, bucket_mb: float, gradient_bytes: int) -> float:
    bucket = min(bucket_mb * 2**20, gradient_bytes)
    return (ceil(gradient_bytes / bucket) + 1) * ALGORITHMS[algorithm](fabric, bucket)


def _predicted_seconds(choice: AllReduceChoice) -> float:
    return choice.seconds
