"""The control word: how all ranks come to the same decisions without ever waiting for each other.

With every update each rank says whether a stop was requested of it, whether the update was masked, `milliseconds << 16
| rank` of the time it was busy before waiting, which names the slowest, and the same milliseconds negated, of which
the fastest rank's are the highest: four int32, agreed under MAX. The host reads the word of `LAG` updates ago, which
has long arrived, so the loop never waits for it; since all ranks read the same word at the same step, all act alike.

A request to stop, from a signal; the loop looks at it once an update.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

STATUS_LAG = 2
"""Updates (or calls of several) between sending a word and acting on it."""

_MAX_MILLISECONDS = 2**15 - 1


@dataclass(frozen=True)
class StepStatus:
    """What all ranks agree on about update `step`: the same on each of them."""

    step: int
    stop_requested: bool
    is_finite: bool
    loss: float
    slowest_rank: int
    slowest_milliseconds: int
    fastest_milliseconds: int
    grad_norm: float | None = None


class StepSync(Protocol):
    """Hands out agreed words, each once, oldest first."""

    def ready(self) -> list[StepStatus]:
        """Those that were sent long enough ago to have arrived without waiting; the same on all ranks."""
        ...

    def drain(self) -> list[StepStatus]:
        """Every word not handed out yet; waits for the newest."""
        ...


def pack(rank: int, *, stop: bool, busy_seconds: float) -> list[int]:
    """What a rank brings to the word: stop, masked (filled in where that is known), slowest, fastest; busy in s."""
    milliseconds = min(round(busy_seconds * 1000), _MAX_MILLISECONDS)
    return [int(stop), 0, milliseconds << 16 | rank, -milliseconds]


def unpack(step: int, agreed: Sequence[int], loss: float, grad_norm: float | None) -> StepStatus:
    """The word of an update from the four integers under MAX."""
    stop, masked, slowest, fastest = agreed
    slow = {"slowest_rank": slowest & 0xFFFF, "slowest_milliseconds": slowest >> 16, "fastest_milliseconds": -fastest}
    return StepStatus(step, bool(stop), not masked, loss, **slow, grad_norm=grad_norm)


class StopRequest:
    """Set by SIGTERM and SIGINT once installed; never by anything that could interrupt an update half way."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> "StopRequest":
        """Handles the signals from now on; call it from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
