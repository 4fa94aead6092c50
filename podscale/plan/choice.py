"""Which all-reduce, and buckets of which size, for a model's gradients over given links."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from podscale.plan.collectives import ALGORITHMS, Fabric

BUCKETS_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
ADVANTAGE = 0.95
"""Another algorithm than the backend's own must promise this share of its time: the model is not the network."""


@dataclass(frozen=True)
class Choice:
    """seconds: predicted for all buckets and, once more, the last one, of whose time nothing hides."""

    algorithm: str
    bucket_mb: float
    seconds: float


def choose(fabric: Fabric, gradient_bytes: int, algorithms: Sequence[str]) -> Choice:
    """The fastest combination of one of `algorithms` and a size of buckets, by the cost model.

    Many small buckets pay for latency, few large ones leave a long last bucket after backward has ended: what is
    minimised is the time of all buckets plus that of one. Between equals the larger bucket wins.
    """
    candidates = [
        Choice(name, bucket, _exposed(fabric, name, bucket, gradient_bytes))
        for name in algorithms
        for bucket in reversed(BUCKETS_MB)
    ]
    best = min(candidates, key=_seconds)
    own = min((choice for choice in candidates if choice.algorithm == "flat"), key=_seconds, default=best)
    return best if best.seconds <= ADVANTAGE * own.seconds else own


def _exposed(fabric: Fabric, algorithm: str, bucket_mb: float, gradient_bytes: int) -> float:
    bucket = min(bucket_mb * 2**20, gradient_bytes)
    return (ceil(gradient_bytes / bucket) + 1) * ALGORITHMS[algorithm](fabric, bucket)


def _seconds(choice: Choice) -> float:
    return choice.seconds
