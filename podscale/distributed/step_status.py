"""Status of a step that all ranks agree on without waiting for each other, and the stop request from a signal.

With each step, the ranks reduce four int32 under MAX:

1. 1 if a stop was requested of the rank.
2. 1 if the step was masked (non-finite).
3. `milliseconds << 16 | rank`, the busy time before waiting: the maximum names the slowest rank.
4. The same milliseconds, negated: the maximum is the fastest rank's.

The host reads the status of `STATUS_LAG` steps ago, which has arrived by then, so the loop never waits for it. All
ranks read the same status at the same step and therefore act the same.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

STATUS_LAG = 2
"""Steps (or calls of several steps) between sending a status and acting on it."""

_MAX_MILLISECONDS = 2**15 - 1


@dataclass(frozen=True)
class StepStatus:
    """Agreed status of one step, the same on every rank."""

    step: int
    stop_requested: bool
    is_finite: bool
    loss: float
    slowest_rank: int
    slowest_milliseconds: int
    fastest_milliseconds: int
    grad_norm: float | None = None


class StepSync(Protocol):
    """Source of agreed statuses; returns each once, oldest first."""

    def ready(self) -> list[StepStatus]:
        """Return the statuses sent at least `STATUS_LAG` steps ago; the same on all ranks, without waiting."""
        ...

    def drain(self) -> list[StepStatus]:
        """Return every status not returned yet; waits for the newest."""
        ...


def pack(rank: int, *, stop: bool, busy_seconds: float) -> list[int]:
    """Return a rank's four integers of the status; the engine sets the second (masked).

    Args:
        busy_seconds: Time before waiting for other ranks.
    """
    milliseconds = min(round(busy_seconds * 1000), _MAX_MILLISECONDS)
    return [int(stop), 0, milliseconds << 16 | rank, -milliseconds]


def unpack(step: int, agreed: Sequence[int], loss: float, grad_norm: float | None) -> StepStatus:
    """Return the status of a step from the four integers after MAX."""
    stop, masked, slowest, fastest = agreed
    slow = {"slowest_rank": slowest & 0xFFFF, "slowest_milliseconds": slowest >> 16, "fastest_milliseconds": -fastest}
    return StepStatus(step, bool(stop), not masked, loss, **slow, grad_norm=grad_norm)


class StopRequest:
    """Flag set by SIGTERM and SIGINT; the loop reads it once a step, so no step is interrupted."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> "StopRequest":
        """Install the signal handlers; call it from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
