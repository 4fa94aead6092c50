"""Goodput: fraction of a run's wall time that made progress, over all launches (see docs/explanation/goodput.md).

Every moment since the first launch belongs to one of `GOODPUT_STATES`, so the states add up to the wall time. The clock
is monotonic within a launch. Between launches it is the wall clock, because a pod may restart on another node. A small
file beside the checkpoints keeps the state; each write of it is a heartbeat.
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

logger = logging.getLogger(__name__)

CLEAN_EXITS = ("done", "preempted")
"""Exit causes after which the time until the next launch counts as `idle`, not as `recovery`."""
DEFAULT_EXIT_CAUSE = "lost_rank"
"""Exit cause if none was recorded, because the pod is gone, and rank 0 with it."""
INTERVAL_SECONDS = 2.0
"""Heartbeat interval, seconds. Object stores accept about one write per second and object."""

_INDEX = {state: index for index, state in enumerate(GOODPUT_STATES)}
"""Index of each state in the lists of seconds."""
_FILE_KEYS = {
    "started_at": "began",
    "launch": "life",
    "exit_cause": "ended",
    "highest_step": "reached",
    "redone_steps": "redone",
}
"""Keys of the goodput file that differ from the field names."""


def _states_by_phase(waiting: str, working: str) -> Mapping[str, int]:
    """Return the index of each phase's state: `waiting` for data_wait, `working` for the other phases of a step."""
    special = {"data_wait": waiting, "checkpoint": "checkpoint_save", "evaluation": "evaluation"}
    return {phase: _INDEX[special.get(phase, working)] for phase in PHASES}


_FIRST_STEP = _states_by_phase("init", "compile")
"""States of the phases of a launch's first step."""
_REDONE_STEP = _states_by_phase("redo", "redo")
"""States of the phases of a step that an earlier launch has done."""
_NEW_STEP = _states_by_phase("data_wait", "productive")
"""States of the phases of any other step."""


def goodput_fraction(seconds: Mapping[str, float]) -> float | None:
    """Return productive seconds over all seconds; None if there are none. `seconds` are by state."""
    total = sum(seconds.values())
    return seconds.get("productive", 0.0) / total if total > 0 else None


@dataclass(frozen=True)
class GoodputState:
    """Time accounting of a run at one moment, as stored in the goodput file.

    Args:
        time: This moment, unix seconds.
        started_at: First launch, unix seconds.
        launch: Number of the launch, from 1.
        age: Seconds since the launch began.
        joined: True if the training of this launch wrote the file, False if the supervisor did.
        exit_cause: `done` or one of RESTART_CAUSES; empty while the launch runs or if no exit was recorded.
        step: Finished steps.
        highest_step: Highest step of any launch.
        redone_steps: Steps repeated after a restart.
        cause: Cause of the launch, one of LAUNCH_CAUSES.
        seconds: Seconds by goodput state, over all launches.
        restarts: Number of restarts by cause.
    """

    time: float
    started_at: float
    launch: int = 1
    age: float = 0.0
    joined: bool = False
    exit_cause: str = ""
    step: int = 0
    highest_step: int = 0
    redone_steps: int = 0
    cause: str = FIRST_LAUNCH
    seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(GOODPUT_STATES, 0.0))
    restarts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(RESTART_CAUSES, 0))

    @classmethod
    def parse(cls, text: str) -> "GoodputState | None":
        """Parse the text of a goodput file; None if it is invalid."""
        fields = {key: name for name, key in _FILE_KEYS.items()}
        try:
            state = cls(**{fields.get(key, key): value for key, value in json.loads(text).items()})
            seconds = {name: float(state.seconds[name]) for name in GOODPUT_STATES}
            restarts = {cause: int(state.restarts[cause]) for cause in RESTART_CAUSES}
            numbers = (state.time, state.started_at, state.age, state.launch, state.step)
            is_valid = min(*numbers, state.highest_step, state.redone_steps) >= 0 and state.cause in LAUNCH_CAUSES
            return replace(state, seconds=seconds, restarts=restarts) if is_valid else None
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def to_json(self) -> str:
        return json.dumps({_FILE_KEYS.get(name, name): value for name, value in asdict(self).items()}) + "\n"

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        return goodput_fraction(self.seconds) or 0.0

    def summary(self) -> dict[str, Any]:
        """Return the values of the event `goodput`."""
        return {
            "goodput": round(self.goodput, 4),
            "wall_seconds": round(self.wall_seconds, 3),
            "seconds": {state: round(value, 3) for state, value in self.seconds.items()},
            "life": self.launch,
            "restarts": dict(self.restarts),
            "redone_steps": self.redone_steps,
        }


def after_launch(previous: GoodputState | None, now: float, age: float) -> GoodputState:
    """Return the state of a new launch.

    The time from the last heartbeat to the beginning of the launch counts as `idle` if the previous launch exited
    cleanly, else as `recovery`; as 0 if the wall clock was set back.

    Args:
        previous: Newest state of the run, None for the first launch.
        now: Wall clock, unix seconds.
        age: Seconds since the launch began.
    """
    if previous is None:
        return GoodputState(now, now - age, age=age, seconds={**dict.fromkeys(GOODPUT_STATES, 0.0), "init": age})
    gap = max(0.0, now - previous.time)
    init = min(age, gap)
    seconds = dict(previous.seconds)
    seconds["idle" if previous.exit_cause in CLEAN_EXITS else "recovery"] += gap - init
    seconds["init"] += init
    restarts = dict(previous.restarts)
    cause = previous.exit_cause or DEFAULT_EXIT_CAUSE
    if cause in restarts:
        restarts[cause] += 1
    launch = replace(previous, time=now, launch=previous.launch + 1, age=init, joined=False, exit_cause="", step=0)
    return replace(launch, cause=cause, seconds=seconds, restarts=restarts)


def after_join(state: GoodputState | None, now: float, age: float, highest_step: int) -> GoodputState:
    """Return the state that the training of a launch continues from, once its ranks have joined.

    Args:
        state: State in the file. If the supervisor did not write it for this launch, a new launch begins.
        now: Wall clock, unix seconds.
        age: Seconds since the launch began.
        highest_step: Highest step in the event log, because a heartbeat may be older than the last step.
    """
    if state is None or state.joined or state.exit_cause:
        state = after_launch(state, now, age)
    waited = max(0.0, age - state.age)
    seconds = {**state.seconds, "init": state.seconds["init"] + waited}
    highest_step = max(state.highest_step, highest_step)
    return replace(state, time=now, age=state.age + waited, joined=True, highest_step=highest_step, seconds=seconds)


class GoodputTracker:
    """Time accounting of a launch. One thread enters states; any thread may read.

    Args:
        initial: State from `after_join`.
        clock: Monotonic clock, seconds.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        initial: GoodputState,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._initial, self._clock, self._wall_clock = initial, clock, wall_clock
        self._start = clock()
        self._step, self._highest_step, self._redone_steps = initial.step, initial.highest_step, initial.redone_steps
        self._state_of_phase = _FIRST_STEP
        # Seconds by state, current state and its start: one tuple, so that other threads read a consistent state.
        self._current = ([initial.seconds[state] for state in GOODPUT_STATES], _INDEX["init"], self._start)

    def enter_phase(self, name: str) -> None:
        """Enter a phase of `telemetry.phases`; its goodput state depends on the current step."""
        self._enter(self._state_of_phase[name])

    def enter_restore(self) -> None:
        """Enter the search and restore of a checkpoint, which lasts until `start`."""
        self._enter(_INDEX["checkpoint_restore"])

    def start(self, step: int) -> None:
        """End the restore: training continues from `step`."""
        self._enter(_INDEX["init"])
        self._step, self._state_of_phase = step, _FIRST_STEP

    def step_done(self, step: int) -> None:
        """Record a finished step, and set the states of the next. Steps that an earlier launch did count as redone."""
        if step <= self._highest_step:
            self._redone_steps += 1
        else:
            self._highest_step = step
        self._step = step
        self._state_of_phase = _REDONE_STEP if step < self._highest_step else _NEW_STEP

    def state(self, exit_cause: str = "") -> GoodputState:
        """Return the state at this moment, to be written to the file."""
        seconds, now = self._seconds()
        return replace(
            self._initial,
            time=self._wall_clock(),
            age=self._initial.age + now - self._start,
            exit_cause=exit_cause,
            step=self._step,
            highest_step=self._highest_step,
            redone_steps=self._redone_steps,
            seconds=dict(zip(GOODPUT_STATES, seconds, strict=True)),
        )

    def launch_seconds(self) -> dict[str, float]:
        """Return the seconds by state of this launch, since the ranks joined."""
        seconds, _ = self._seconds()
        return {
            state: value - self._initial.seconds[state] for state, value in zip(GOODPUT_STATES, seconds, strict=True)
        }

    def samples(self) -> Iterator[MetricSample]:
        state = self.state()
        yield from (("train_wall_seconds", (name,), seconds) for name, seconds in state.seconds.items())
        yield from (("train_restarts", (cause,), count) for cause, count in state.restarts.items())
        yield "train_launch_timestamp_seconds", (state.cause,), self._initial.time - self._initial.age

    def _enter(self, state: int) -> None:
        if state != self._current[1]:
            seconds, now = self._seconds()
            self._current = (seconds, state, now)

    def _seconds(self) -> tuple[list[float], float]:
        past_seconds, current, since = self._current
        seconds, now = past_seconds.copy(), self._clock()
        seconds[current] += now - since
        return seconds, now


class GoodputWriter:
    """Writer of the goodput file: at the start, every `interval_seconds` on its own thread, and when closed.

    On a full disk heartbeats are lost with one warning; the training continues.

    Args:
        fence: Called before each write; raises PodscaleError if a newer launch owns the run. The write is then skipped.
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

    def close(self, exit_cause: str = "") -> None:
        """Stop the thread and write the last state; `exit_cause` is empty if unknown."""
        self._closed.set()
        self._thread.join()
        self._write(exit_cause)

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            self._write()

    def _write(self, exit_cause: str = "") -> None:
        try:
            write_goodput_state(self._path, self._tracker.state(exit_cause), self._fence)
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
    """Replace the file atomically. Raises OSError, and what `fence` raises.

    The temporary file has a fixed name, so that none is left behind by killed writers. The lease ensures one writer.
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
