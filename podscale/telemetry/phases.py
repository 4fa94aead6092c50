"""Where the time goes: every moment belongs to exactly one phase."""

from collections.abc import Mapping
from time import perf_counter
from types import TracebackType

PHASES = (
    "data_wait",
    "h2d",
    "forward_backward",
    "allreduce_wait",
    "optimizer",
    "checkpoint",
    "evaluation",
    "other",
)
OTHER_INDEX = PHASES.index("other")
NON_STEP_PHASES = ("evaluation", "checkpoint")
"""Phases that are no part of an update."""


class PhaseClock:
    """Seconds by phase since it was made; they add up to the wall time.

    A phase inside another interrupts it: the time counts for the inner one alone. What no phase claims is `other`.
    Entered and left by one thread; read by any.
    """

    def __init__(self) -> None:
        self._seconds = [0.0] * len(PHASES)
        self._running = (OTHER_INDEX, perf_counter())
        self._outer: list[int] = []
        self._phases = {name: _Phase(self, index) for index, name in enumerate(PHASES)}

    def phase(self, name: str) -> "_Phase":
        """A context manager that books its time on `name`; KeyError for a name not in PHASES."""
        return self._phases[name]

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, the running one included.

        Another thread may read a moment's time as not yet booked, never as booked twice.
        """
        booked = list(self._seconds)
        index, since = self._running
        booked[index] += perf_counter() - since
        return dict(zip(PHASES, booked, strict=True))

    def _enter(self, index: int) -> None:
        self._outer.append(self._running[0])
        self._switch(index)

    def _leave(self) -> None:
        self._switch(self._outer.pop())

    def _switch(self, index: int) -> None:
        now = perf_counter()
        running, since = self._running
        self._running = (index, now)
        self._seconds[running] += now - since


class _Phase:
    __slots__ = ("_clock", "_index")

    def __init__(self, clock: PhaseClock, index: int) -> None:
        self._clock = clock
        self._index = index

    def __enter__(self) -> None:
        self._clock._enter(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock._leave()


def phase_fractions(phases: Mapping[str, float]) -> dict[str, float]:
    """Each phase's share of the time that updates took; evaluation and checkpoints are no part of them."""
    updates = {name: seconds for name, seconds in phases.items() if name not in NON_STEP_PHASES}
    whole = sum(updates.values())
    return {name: seconds / whole for name, seconds in updates.items()} if whole > 0 else {}
