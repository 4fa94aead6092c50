"""Where the time goes: every moment belongs to exactly one phase.

Which rank holds the others up: the time each is busy before it begins to wait for them, compared every interval.

In synchronous training every rank takes as long for an update as the slowest, so images/s cannot tell them apart; the
busy time can. Ranks compare its mean over an interval, in which one slow update of many does not count for much, and
nobody is named for a single interval.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any

from podscale.telemetry.registry import MetricSample

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


STRAGGLER_RATIO = 1.25
"""Busy time of the slowest rank over that of the fastest from which it is worth a word."""
MIN_GAP_MILLISECONDS = 3
"""Between the two, below which their ratio is that of rounding and noise."""
CONSECUTIVE_INTERVALS = 3
"""So many in a row, with the same rank in front, before that is named; and as many without, before it is over."""
MIN_INTERVAL_STEPS = 10


def interval_steps(log_every: int) -> int:
    """Updates of an interval: those between two lines of the log, or several times as many where they are few."""
    return -(-MIN_INTERVAL_STEPS // log_every) * log_every


class BusyTime:
    """The busy time of this rank in seconds: in all, and on average over the updates of the interval so far.

    The first update of a process counts in all alone: caches are filled and kernels chosen in it.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._fresh = True
        self._on_device = 0.0
        self._sum, self._steps = 0.0, 0

    def add(self, seconds: float) -> None:
        """One update, by the host's clock; the device's own time counts where it is known to be longer."""
        seconds = max(seconds, self._on_device)
        self.total += seconds
        if self._fresh:
            self._fresh = False
        else:
            self._sum += seconds
            self._steps += 1

    def set_device_seconds(self, seconds: float) -> None:
        """What the device takes for the same, as sampled: a host that only launches work does not see it."""
        self._on_device = seconds

    @property
    def mean(self) -> float:
        """0 before the second update."""
        return self._sum / self._steps if self._steps else 0.0

    def next_interval(self) -> None:
        self._sum, self._steps = 0.0, 0

    def samples(self) -> Iterator[MetricSample]:
        """What is exported."""
        yield "train_busy_seconds", (), self.total


@dataclass(frozen=True)
class RankComparison:
    """The slowest and the fastest rank of an interval: mean milliseconds busy in an update."""

    rank: int
    milliseconds: int
    fastest_milliseconds: int

    @property
    def ratio(self) -> float:
        return self.milliseconds / max(1, self.fastest_milliseconds)

    @property
    def is_notable(self) -> bool:
        return self.ratio >= STRAGGLER_RATIO and self.milliseconds - self.fastest_milliseconds >= MIN_GAP_MILLISECONDS


class StragglerDetector:
    """Rank 0's memory of the intervals: names a rank that stays the slowest, and says when that is over.

    hosts: of every rank, by number. log_event: takes the name of an event and its values.
    """

    def __init__(self, hosts: Sequence[str], log_event: Callable[..., None]) -> None:
        self._hosts, self._log_event = hosts, log_event
        self.latest: RankComparison | None = None
        self._suspect, self._times = -1, 0
        self._named, self._calm = -1, 0

    def interval_done(self, step: int, found: RankComparison) -> None:
        """The interval that ended with update `step`."""
        self.latest = found
        suspect = found.rank if found.is_notable else -1
        self._times = self._times + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if self._named >= 0:
            self._calm = 0 if suspect == self._named else self._calm + 1
            if self._calm == CONSECUTIVE_INTERVALS:
                self._log_event("straggler_over", step=step, **self._who(self._named))
                self._named = -1
        if suspect >= 0 and suspect != self._named and self._times >= CONSECUTIVE_INTERVALS:
            self._named, self._calm = suspect, 0
            figures = {"milliseconds": found.milliseconds, "fastest_milliseconds": found.fastest_milliseconds}
            self._log_event("straggler", step=step, **self._who(suspect), ratio=round(found.ratio, 3), **figures)

    def samples(self) -> Iterator[MetricSample]:
        """What is exported: nothing before the first interval."""
        if self.latest is not None:
            yield "train_straggler_rank", (), self.latest.rank
            yield "train_straggler_ratio", (), self.latest.ratio

    def _who(self, rank: int) -> dict[str, Any]:
        return {"rank": rank, "host": self._hosts[rank]}
