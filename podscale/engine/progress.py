"""How far a run has come, and what its last evaluation found."""

from dataclasses import dataclass, field
from typing import Any


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
