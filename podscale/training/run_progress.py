"""What an evaluation during training finds, and its sums over batches and ranks.

How far a run has come, and what its last evaluation found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from podscale.errors import PodscaleError


@dataclass
class RunProgress:
    """How far a run has come; kept in a checkpoint's meta.

    step: updates done, masked ones included. skipped: masked updates, in all and at the end in a row.
    origin: where its first weights are from, where those are another run's (see engine.origin).
    evaluated: updates done at the newest evaluation, and what it found.
    """

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluated: int = -1
    evaluation: dict[str, float] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def top1(self) -> float | None:
        """Validation accuracy of exactly this state, where it was measured."""
        return self.evaluation["top1"] if self.evaluated == self.step else None


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
