"""Wall time of a training by phase, and detection of the slowest rank (straggler).

In synchronous training every rank's step takes as long as the slowest rank's, so images/s do not show the slowest rank.
The busy time before a rank waits for the others does. Ranks compare its mean over an interval, so that one slow step
does not count.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any

from podscale.telemetry.catalogue import PHASE_LABEL
from podscale.telemetry.registry import MetricSample

PHASES = PHASE_LABEL["phase"]
OTHER_INDEX = PHASES.index("other")
NON_STEP_PHASES = ("evaluation", "checkpoint")
STRAGGLER_RATIO = 1.25
"""Smallest ratio of the slowest rank's busy time to the fastest's that counts as a straggler."""
MIN_GAP_MILLISECONDS = 3
"""Smallest difference of busy times that counts, milliseconds; less is noise."""
CONSECUTIVE_INTERVALS = 3
"""Consecutive intervals before a straggler is reported, and before its end is reported."""
MIN_INTERVAL_STEPS = 10


class PhaseClock:
    """Clock of the seconds by phase since its creation; they add up to the wall time.

    The time of an inner phase does not count for the outer one. Time outside all phases is `other`. One thread enters
    and leaves phases; any thread reads.
    """

    def __init__(self) -> None:
        self._seconds = [0.0] * len(PHASES)
        self._running = (OTHER_INDEX, perf_counter())
        self._outer: list[int] = []
        self._phases = {name: _Phase(self, index) for index, name in enumerate(PHASES)}

    def phase(self, name: str) -> "_Phase":
        """Return a context manager that adds its time to `name`, one of PHASES."""
        return self._phases[name]

    def seconds(self) -> dict[str, float]:
        """Return the seconds by phase; on another thread the newest interval may be missing, but never counts twice."""
        seconds = list(self._seconds)
        index, since = self._running
        seconds[index] += perf_counter() - since
        return dict(zip(PHASES, seconds, strict=True))

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
    """Return each phase's fraction of the step time, without evaluation and checkpoints."""
    step_phases = {name: seconds for name, seconds in phases.items() if name not in NON_STEP_PHASES}
    total = sum(step_phases.values())
    return {name: seconds / total for name, seconds in step_phases.items()} if total > 0 else {}


def interval_steps(log_every: int) -> int:
    """Return the steps of an interval: a multiple of `log_every`, at least `MIN_INTERVAL_STEPS`."""
    return -(-MIN_INTERVAL_STEPS // log_every) * log_every


class BusyTime:
    """Busy time of this rank, seconds: total, and mean over the steps of the current interval.

    The mean leaves out the first step of a process, which fills caches and selects kernels.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._fresh = True
        self._on_device = 0.0
        self._sum, self._steps = 0.0, 0

    def add(self, seconds: float) -> None:
        """Add one step by the host's clock, or its sampled device time if that is longer."""
        seconds = max(seconds, self._on_device)
        self.total += seconds
        if self._fresh:
            self._fresh = False
        else:
            self._sum += seconds
            self._steps += 1

    def set_device_seconds(self, seconds: float) -> None:
        """Set the sampled device time of a step, which the host's clock misses if it only launches kernels."""
        self._on_device = seconds

    @property
    def mean(self) -> float:
        """Mean of the interval; 0 before the second step."""
        return self._sum / self._steps if self._steps else 0.0

    def next_interval(self) -> None:
        self._sum, self._steps = 0.0, 0

    def samples(self) -> Iterator[MetricSample]:
        yield "train_busy_seconds", (), self.total


@dataclass(frozen=True)
class RankComparison:
    """Slowest and fastest rank of an interval, with their mean busy milliseconds per step."""

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
    """Detector on rank 0 that reports a rank which stays the slowest, and when it no longer is.

    Args:
        hosts: Host name of every rank.
        log_event: Receives the name of an event and its values.
    """

    def __init__(self, hosts: Sequence[str], log_event: Callable[..., None]) -> None:
        self._hosts, self._log_event = hosts, log_event
        self.latest: RankComparison | None = None
        self._suspect, self._suspect_intervals = -1, 0
        self._straggler, self._calm_intervals = -1, 0

    def interval_done(self, step: int, comparison: RankComparison) -> None:
        self.latest = comparison
        suspect = comparison.rank if comparison.is_notable else -1
        self._suspect_intervals = self._suspect_intervals + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if self._straggler >= 0:
            self._calm_intervals = 0 if suspect == self._straggler else self._calm_intervals + 1
            if self._calm_intervals == CONSECUTIVE_INTERVALS:
                self._log_event("straggler_over", step=step, **self._identity(self._straggler))
                self._straggler = -1
        if suspect >= 0 and suspect != self._straggler and self._suspect_intervals >= CONSECUTIVE_INTERVALS:
            self._straggler, self._calm_intervals = suspect, 0
            self._log_event(
                "straggler",
                step=step,
                **self._identity(suspect),
                ratio=round(comparison.ratio, 3),
                milliseconds=comparison.milliseconds,
                fastest_milliseconds=comparison.fastest_milliseconds,
            )

    def samples(self) -> Iterator[MetricSample]:
        if self.latest is not None:
            yield "train_straggler_rank", (), self.latest.rank
            yield "train_straggler_ratio", (), self.latest.ratio

    def _identity(self, rank: int) -> dict[str, Any]:
        return {"rank": rank, "host": self._hosts[rank]}
