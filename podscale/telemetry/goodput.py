"""Where the wall time of a run goes, over all its lives: the ledger behind its goodput.

A life is one start of a run's ranks. Every moment since the first launch belongs to exactly one of `STATES`, so the
states add up to the wall time. Inside a life a clock is used that cannot be set; the calendar's only between lives,
for a pod may come back on another machine. What the states mean: docs/goodput.md.

The book of a run in a small file beside its checkpoints, so that it outlives every process of the run.
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
"""Endings after which nobody was at work until the next launch, whoever was to launch it."""
DEFAULT_EXIT_CAUSE = "lost_rank"
"""How a life ended of which nobody said how: its pod is gone, and rank 0 with it."""

_INDEX = {state: number for number, state in enumerate(GOODPUT_STATES)}
_PHASE_STATES = {"checkpoint": "checkpoint_save", "evaluation": "evaluation"}


def _states_by_phase(data: str, work: str) -> Mapping[str, int]:
    """The state of each phase of an update, by the state of waiting for data and that of the rest."""
    return {phase: _INDEX[{"data_wait": data, **_PHASE_STATES}.get(phase, work)] for phase in PHASES}


_FIRST_STEP = _states_by_phase("init", "compile")
_REDONE_STEP = _states_by_phase("redo", "redo")
_NEW_STEP = _states_by_phase("data_wait", "productive")


def goodput_fraction(seconds: Mapping[str, float]) -> float | None:
    """The share of a run's wall seconds, by state, that brought it on; None where there are none."""
    whole = sum(seconds.values())
    return seconds.get("productive", 0.0) / whole if whole > 0 else None


@dataclass(frozen=True)
class GoodputState:
    """All that is known of a run's time at one moment, as a heartbeat keeps it.

    time, began: this moment and the first launch, in seconds since 1970. life: number of the launch, from 1; age:
    seconds since it began. joined: its training keeps the book. ended: `done` or one of RESTART_CAUSES; empty while it
    lives, and where nobody could say. step: updates done; reached: the most that any life has done; redone: updates
    done before, by an earlier life, and again. cause: one of LAUNCH_CAUSES. seconds: by state; restarts: by cause.
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
        """None for what no `text` of this version is."""
        try:
            book = cls(**json.loads(text))
            seconds = {state: float(book.seconds[state]) for state in GOODPUT_STATES}
            restarts = {cause: int(book.restarts[cause]) for cause in RESTART_CAUSES}
            numbers = (book.time + book.began + book.age, book.life + book.step + book.reached + book.redone)
            sound = book.cause in LAUNCH_CAUSES and all(n >= 0 for n in numbers)
            return replace(book, seconds=seconds, restarts=restarts) if sound else None
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
        """The share of the wall time that brought the run on; 0 before there is any."""
        return goodput_fraction(self.seconds) or 0.0

    def summary(self) -> dict[str, Any]:
        """The figures for people and the log."""
        return {
            "goodput": round(self.goodput, 4),
            "wall_seconds": round(self.wall_seconds, 3),
            "seconds": {state: round(value, 3) for state, value in self.seconds.items()},
            "life": self.life,
            "restarts": dict(self.restarts),
            "redone_steps": self.redone,
        }


def after_launch(previous: GoodputState | None, now: float, age: float) -> GoodputState:
    """The book of a life that began `age` seconds before the calendar said `now`, after all that `past` holds.

    The time since the last heartbeat is `idle` where the life before ended in order, else `recovery`. A calendar that
    went back in between makes that nothing, never less.
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
    """The book as the training of a life takes it over, `age` seconds after the life began.

    found: what the launch wrote of this life; where that is of a life before, a new one begins. reached: updates that
    are known to have been done, from elsewhere: a heartbeat may be older than the last of them.
    """
    if found is None or found.joined or found.ended:
        found = after_launch(found, now, age)
    waited = max(0.0, age - found.age)
    seconds = {**found.seconds, "init": found.seconds["init"] + waited}
    reached = max(found.reached, reached)
    return replace(found, time=now, age=found.age + waited, joined=True, reached=reached, seconds=seconds)


class GoodputTracker:
    """Keeps the book of a life that trains: entered by one thread, read by any.

    A state lasts until the next one is entered; to change it costs less than a microsecond.
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
        # Replaced as a whole, so that a reader never sees a moment twice or not at all.
        self._current = ([initial.seconds[state] for state in GOODPUT_STATES], _INDEX["init"], self._began)

    def enter_phase(self, name: str) -> None:
        """A phase of telemetry.phases begins."""
        self._enter(self._state_of_phase[name])

    def enter_restore(self) -> None:
        """Looks for a checkpoint and reads it, until `begin`."""
        self._enter(_INDEX["checkpoint_restore"])

    def start(self, step: int) -> None:
        """Training is about to go on after `step` updates."""
        self._enter(_INDEX["init"])
        self._step, self._state_of_phase = step, _FIRST_STEP

    def step_done(self, step: int) -> None:
        """Update `step` is done: what an earlier life had reached is being repeated until that is passed."""
        if step <= self._reached:
            self._redone += 1
        else:
            self._reached = step
        self._step = step
        self._state_of_phase = _REDONE_STEP if step < self._reached else _NEW_STEP

    def state(self, ended: str = "") -> GoodputState:
        """The book of this moment."""
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
        """What is exported of the book of this moment."""
        book = self.state()
        yield from (("train_wall_seconds", (state,), seconds) for state, seconds in book.seconds.items())
        yield from (("train_restarts", (cause,), count) for cause, count in book.restarts.items())
        yield "train_launch_timestamp_seconds", (book.cause,), self._launched

    def _enter(self, state: int) -> None:
        booked, running, since = self._current
        if state == running:
            return
        now = self._clock()
        seconds = booked.copy()
        seconds[running] += now - since
        self._current = (seconds, state, now)


logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 2.0
"""An object store takes about one write a second of one object; what is lost at a kill is booked as recovery."""


class GoodputWriter:
    """Writes the ledger's book now, every `interval` seconds on a thread of its own, and when it is closed.

    `fence` raises where a newer launch has taken the run over: then this one's book is of no interest any more. A full
    disk costs heartbeats, and one warning, not the training.
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
        """ended: how this life did, where that is known here."""
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
            return  # the loop hears of it at the next line of its log
        except OSError as error:
            if not self._warned:
                logger.warning("%s: heartbeats are being lost: %s", self._path, error.strerror)
            self._warned = True


def read_goodput_state(path: Path) -> GoodputState | None:
    """The book in `path`; None where there is none that can be read."""
    try:
        return GoodputState.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_goodput_state(path: Path, state: GoodputState, fence: Callable[[], None] | None = None) -> None:
    """Replaces the file as a whole; raises OSError where the file system refuses, and what `fence` raises.

    The temporary neighbour has a fixed name, so that a writer that is killed leaves nothing that the next one does not
    take away; the lease sees to it that there is one writer.
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
