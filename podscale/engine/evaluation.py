"""What an evaluation during training finds, and its sums over batches and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from podscale.errors import PodscaleError

TOP_K = 5
BATCHES_PER_STOP_CHECK = 4
"""Batches between two looks at requests to stop."""


@dataclass(frozen=True)
class EvaluationResult:
    """Shares of right answers among the first and the first five guesses, mean loss in nats, images, seconds."""

    top1: float
    top5: float
    loss: float
    images: int
    seconds: float


def evaluation_result(sums: Sequence[float], count: int, seconds: float) -> EvaluationResult:
    """From the sums over all samples: right first guesses, right first five, losses, images; `count`: of the split.

    Raises PodscaleError where not one image could be read.
    """
    top1, top5, loss, images = sums
    assert images <= count, f"{images} of {count} validation images were seen"
    if images == 0:
        raise PodscaleError("no validation image could be decoded", hint="Run `podscale shard --verify`")
    return EvaluationResult(top1 / images, top5 / images, loss / images, int(images), seconds)
