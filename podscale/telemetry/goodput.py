"""Goodput: fraction of a run's wall time that made progress, over all launches.

Every moment since the first launch belongs to exactly one of `GOODPUT_STATES`, so the states add up to the wall time
(see docs/goodput.md). Time is measured by a monotonic clock within a launch, and by the wall clock between launches,
because a pod may restart on another node. A small file beside the checkpoints keeps the state, so that it outlives
every process of the run.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from podscale.errors import PodscaleError
from podscale.telemetry.catalogue import FIRST_LAUNCH, GOODPUT_STATES, LAUNCH_CAUSES, RESTART_CAUSES
from podscale.telemetry.phases import PHASES
from podscale.telemetry.registry import MetricSample

CLEAN_EXITS = ("done", "preempted")
"""Exit causes after which the time until the next launch is idle."""
DEFAULT_EXIT_CAUSE = "lost_rank"
"""Default cause when no exit was recorded: the pod is gone, and rank 0 with it."""

_INDEX = {state: number for number, state in enumerate(GOODPUT_STATES)}
_PHASE_STATES = {"checkpoint": "checkpoint_save", "evaluation": "evaluation"}


def _states_by_phase(data: str, work: str) -> Mapping[str, int]:
    """Return the state of each phase of a step, from the states of waiting for data and of the rest."""
    return {phase: _INDEX[{"data_wait": data, **_PHASE_STATES}.get(phase, work)] for phase in PHASES}


_FIRST_STEP = _states_by_phase("init", "compile")
_REDONE_STEP = _states_by_phase("redo", "redo")
_NEW_STEP = _states_by_phase("data_wait", "productive")


def goodput_fraction(seconds: Mapping[str, float]) -> float | None:
    """Return the fraction of the wall time that made progress; None without wall time."""
    whole = sum(seconds.values())
    return seconds.get("productive", 0.0) / whole if whole > 0 else None


@dataclass(frozen=True)
class GoodputState:
    """Time accounting of a run at one moment, as stored in the goodput file.

    Args:
        time: This moment, unix seconds.
        began: First launch, unix seconds.
        life: Number of the launch, from 1.
        age: Seconds since the launch began.
        joined: The training of this launch has taken over the state.
        ended: `done` or one of RESTART_CAUSES; empty while the launch runs or if no exit was recorded.
        step: Finished steps.
        reached: Highest step of any launch.
        redone: Steps repeated after a restart.
        cause: One of LAUNCH_CAUSES.
        seconds: Seconds by state.
        restarts: Restarts by cause.
    """

    time: float
    began: float
    life: int = 1
    age: float = 0.0
    joined: bool = False
    ended: str = ""
    step: int = 0
    reached: int = 0
    redone: int = 0
    cause: str = FIRST_LAUNCH
    seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(GOODPUT_STATES, 0.0))
    restarts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(RESTART_CAUSES, 0))

    @classmethod
    def parse(cls, text: str) -> "GoodputState | None":
        """Return the state of a file's text; None if it is invalid or of another version."""
        try:
            parsed = cls(**json.loads(text))
            seconds = {state: float(parsed.seconds[state]) for state in GOODPUT_STATES}
            restarts = {cause: int(parsed.restarts[cause]) for cause in RESTART_CAUSES}
            numbers = (
                parsed.time + parsed.began + parsed.age,
                parsed.life + parsed.step + parsed.reached + parsed.redone,
            )
            sound = parsed.cause in LAUNCH_CAUSES and all(n >= 0 for n in numbers)
            return replace(parsed, seconds=seconds, restarts=restarts) if sound else None
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @property
    def wall_seconds(self) -> float:
        """Seconds since the first launch."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Fraction of the wall time that made progress; 0 at the start."""
        return goodput_fraction(self.seconds) or 0.0

    def summary(self) -> dict[str, Any]:
        """Return the values for the log and for reports."""
        return {
            "goodput": round(self.goodput, 4),
            "wall_seconds": round(self.wall_seconds, 3),
            "seconds": {state: round(value, 3) for state, value in self.seconds.items()},
            "life": self.life,
            "restarts": dict(self.restarts),
            "redone_steps": self.redone,
        }


def after_launch(previous: GoodputState | None, now: float, age: float) -> GoodputState:
    """Return the state of a new launch.

    The time since the last heartbeat is `idle` if the previous launch exited cleanly, else `recovery`. If the wall
    clock was set back in between, that time is 0.

    Args:
        previous: Newest state of the run, None for the first launch.
        now: Wall clock, unix seconds.
        age: Seconds since the launch began.
    """
    if previous is None:
        return GoodputState(now, now - age, age=age, seconds={**dict.fromkeys(GOODPUT_STATES, 0.0), "init": age})
    since = max(0.0, now - previous.time)
    init = min(age, since)
    gap = "idle" if previous.ended in CLEAN_EXITS else "recovery"
    seconds = dict(previous.seconds)
    seconds[gap] += since - init
    seconds["init"] += init
    restarts = dict(previous.restarts)
    cause = previous.ended or DEFAULT_EXIT_CAUSE
    if cause in restarts:
        restarts[cause] += 1
    fresh = GoodputState(
        now, previous.began, previous.life + 1, init, reached=previous.reached, redone=previous.redone, cause=cause
    )
    return replace(fresh, seconds=seconds, restarts=restarts)


def after_join(found: GoodputState | None, now: float, age: float, reached: int) -> GoodputState:
    """Return the state that the training of a launch continues from.

    Args:
        found: State that the launcher wrote for this launch; one of an earlier launch starts a new launch.
        now: Wall clock, unix seconds.
        age: Seconds since the launch began.
        reached: Highest step known from elsewhere: a heartbeat may be older than the last step.
    """
    if found is None or found.joined or found.ended:
        found = after_launch(found, now, age)
    waited = max(0.0, age - found.age)
    seconds = {**found.seconds, "init": found.seconds["init"] + waited}
    reached = max(found.reached, reached)
    return replace(found, time=now, age=found.age + waited, joined=True, reached=reached, seconds=seconds)


class GoodputTracker:
    """Time accounting of a launch: one thread enters states, any thread reads.

    A state lasts until the next is entered; a change takes less than a microsecond.
    """

    def __init__(
        self,
        initial: GoodputState,
        *,
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        self._initial, self._clock, self._calendar = initial, clock, calendar
        self._began = clock()
        self._launched = initial.time - initial.age
        self._step, self._reached, self._redone = initial.step, initial.reached, initial.redone
        self._state_of_phase = _FIRST_STEP
        # Replaced as one tuple, so that a reader on another thread sees a consistent state.
        self._current = ([initial.seconds[state] for state in GOODPUT_STATES], _INDEX["init"], self._began)

    def enter_phase(self, name: str) -> None:
        """Enter a phase of telemetry.phases."""
        self._enter(self._state_of_phase[name])

    def enter_restore(self) -> None:
        """Enter the search and restore of a checkpoint, until `start`."""
        self._enter(_INDEX["checkpoint_restore"])

    def start(self, step: int) -> None:
        """Set the step that training continues from."""
        self._enter(_INDEX["init"])
        self._step, self._state_of_phase = step, _FIRST_STEP

    def step_done(self, step: int) -> None:
        """Record a finished step; steps up to the highest of earlier launches count as redone."""
        if step <= self._reached:
            self._redone += 1
        else:
            self._reached = step
        self._step = step
        self._state_of_phase = _REDONE_STEP if step < self._reached else _NEW_STEP

    def state(self, ended: str = "") -> GoodputState:
        """Return the current state."""
        booked, running, since = self._current
        now = self._clock()
        seconds = list(booked)
        seconds[running] += now - since
        return replace(
            self._initial,
            time=self._calendar(),
            age=self._initial.age + now - self._began,
            ended=ended,
            step=self._step,
            reached=self._reached,
            redone=self._redone,
            seconds=dict(zip(GOODPUT_STATES, seconds, strict=True)),
        )

    def samples(self) -> Iterator[MetricSample]:
        """Yield the exported metrics."""
        book = self.state()
        yield from (("train_wall_seconds", (state,), seconds) for state, seconds in book.seconds.items())
        yield from (("train_restarts", (cause,), count) for cause, count in book.restarts.items())
        yield "train_launch_timestamp_seconds", (book.cause,), self._launched

    def _enter(self, state: int) -> None:
        state_seconds, current, since = self._current
        if state == current:
            return
        now = self._clock()
        seconds = state_seconds.copy()
        seconds[current] += now - since
        self._current = (seconds, state, now)


logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 2.0
"""Heartbeat interval, seconds. Object stores take about one write a second of one object."""


class GoodputWriter:
    """Writer of the goodput file: at once, every `interval_seconds` on its own thread, and when closed.

    `fence` raises if a newer launch owns the run; the write is then skipped. A full disk loses heartbeats and logs one
    warning, but does not stop the training.
    """

    def __init__(
        self,
        tracker: GoodputTracker,
        path: Path,
        fence: Callable[[], None] | None,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._tracker, self._path, self._fence, self._interval = tracker, path, fence, interval_seconds
        self._warned = False
        self._closed = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self, ended: str = "") -> None:
        """Write the last state; `ended` is the exit cause if known."""
        self._closed.set()
        self._thread.join()
        self._write(ended)

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            self._write()

    def _write(self, ended: str = "") -> None:
        try:
            write_goodput_state(self._path, self._tracker.state(ended), self._fence)
        except PodscaleError:
            return  # the event log raises the same error in the training loop
        except OSError as error:
            if not self._warned:
                logger.warning("%s: heartbeats are being lost: %s", self._path, error.strerror)
            self._warned = True


def read_goodput_state(path: Path) -> GoodputState | None:
    """Return the state in `path`; None if there is none or it cannot be parsed."""
    try:
        return GoodputState.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_goodput_state(path: Path, state: GoodputState, fence: Callable[[], None] | None = None) -> None:
    """Replace the file atomically. Raises OSError and what `fence` raises.

    The temporary file has a fixed name, so the next writer replaces what a killed writer left. The lease ensures that
    there is one writer.
    """
    if fence is not None:
        fence()
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(state.to_json())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
