"""Progress of a run, and the result of an evaluation during training."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from podscale.errors import PodscaleError


@dataclass
class RunProgress:
    """Progress of a run, stored in a checkpoint's metadata.

    Args:
        step: steps done, masked ones included.
        skipped: masked (non-finite) steps in all.
        skipped_in_a_row: masked steps since the last finite one.
        evaluated: step of the newest evaluation; -1 if there was none.
        evaluation: top1, top5 and loss of the newest evaluation.
        origin: provenance of the initial weights, unless they are random (see `initial_weights`).
    """

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluated: int = -1
    evaluation: dict[str, float] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def top1(self) -> float | None:
        """Validation accuracy of exactly this state, or None if it was not evaluated."""
        return self.evaluation["top1"] if self.evaluated == self.step else None


TOP_K = 5
BATCHES_PER_STOP_CHECK = 4
"""Interval between two checks for a stop request during an evaluation, batches."""


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one evaluation: accuracies from 0 to 1, and the mean cross entropy `loss` in nats."""

    top1: float
    top5: float
    loss: float
    images: int
    seconds: float

    @property
    def scores(self) -> dict[str, float]:
        return {"top1": self.top1, "top5": self.top5, "loss": self.loss}


def evaluation_result(sums: Sequence[float], count: int, seconds: float) -> EvaluationResult:
    """Return the result of an evaluation from its sums over all ranks.

    Args:
        sums: top-1 hits, top-5 hits, sum of losses, images.
        count: images of the split.
    """
    top1, top5, loss, images = sums
    assert images <= count, f"{images} of {count} validation images were seen"
    if images == 0:
        raise PodscaleError("no validation image could be decoded", hint="Run `podscale shard --verify`")
    return EvaluationResult(top1 / images, top5 / images, loss / images, int(images), seconds)
