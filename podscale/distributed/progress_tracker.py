"""What the ranks say of themselves while they work, and what can be read from all of it after a failure.

How long a rank waits for an update before it calls it a hang: learned from the updates there were.
"""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from podscale.telemetry.phases import PHASES
from podscale.telemetry.registry import MetricSample
from podscale.util import processes

P99_MULTIPLE = 10.0
"""So often as long as an update takes, but for the slowest in a hundred, is no longer a matter of noise."""
MIN_STEPS = 10
WINDOW_STEPS = 256


class HangLimit:
    """`most` seconds until some updates are known, then `TIMES` their 99th percentile between `least` and `most`.

    Times are added by one thread, the limit is read by others, about once a second.
    """

    def __init__(self, min_seconds: float, max_seconds: float) -> None:
        self._min_seconds, self._max_seconds = min(min_seconds, max_seconds), max_seconds
        self._recent: list[float] = []
        self._added = 0

    def add(self, seconds: float) -> None:
        """An update took `seconds`."""
        if len(self._recent) < WINDOW_STEPS:
            self._recent.append(seconds)
        else:
            self._recent[self._added % WINDOW_STEPS] = seconds
        self._added += 1

    @property
    def seconds(self) -> float:
        """The limit of this moment."""
        recent = sorted(self._recent)
        if len(recent) < MIN_STEPS:
            return self._max_seconds
        return min(self._max_seconds, max(self._min_seconds, P99_MULTIPLE * recent[(len(recent) - 1) * 99 // 100]))

    def samples(self) -> Iterator[MetricSample]:
        """What is exported."""
        yield "train_hang_limit_seconds", (), self.seconds


UNTIMED_PHASES = ("start", "checkpoint", "evaluation")
"""Phases whose length says nothing about updates."""


class ProgressTracker:
    """What a rank is doing: the phase (names in telemetry.phases) of the update after `step` updates."""

    def __init__(self, limit: HangLimit | None = None) -> None:
        self.step, self.phase = 0, "start"
        self.hang_limit = limit
        """Of one update; None: nobody calls it a hang."""
        self.step_changes = 0
        """Rises with every update, and with every end of what stands between two of them."""
        self.changes = 0
        """Rises with every sign of progress: a rank whose number stands still does not get on."""
        self.first_step_done = False
        """Whether an update was done in this launch: the first may take long, for the network is compiled in it."""

    def start(self, step: int) -> None:
        """The training goes on after `step` updates."""
        self.step = step
        self.changes += 1

    @property
    def in_step(self) -> bool:
        """Whether this rank is in an update, and not in its first, in which the network is compiled."""
        return self.first_step_done and self.phase not in UNTIMED_PHASES

    def enter_phase(self, phase: str) -> None:
        if self.phase in UNTIMED_PHASES:
            self.step_changes += 1
        self.phase = phase
        self.changes += 1

    def touch(self) -> None:
        """Some progress inside a phase."""
        self.changes += 1

    def step_done(self, step: int, seconds: float | None = None) -> None:
        """seconds: that the update took."""
        if self.hang_limit is not None and self.first_step_done and seconds is not None:
            self.hang_limit.add(seconds)
        self.step = step
        self.first_step_done = True
        self.changes += 1
        self.step_changes += 1

    def __str__(self) -> str:
        return place_text(self.step, self.phase)


@dataclass(frozen=True)
class HeartbeatRecord:
    """What a rank says of itself; `ended`: why it ends, empty while it lives; `follows`: only because of another."""

    beat: int
    step: int
    phase: str
    host: str
    pid: int
    ended: str = ""
    follows: bool = False

    @property
    def process_state(self) -> str:
        """What has become of a process that no longer writes: seen on the same host, unknown elsewhere."""
        if self.host != socket.gethostname():
            return "does not answer"
        if not processes.is_alive(self.pid):
            return "is gone"
        return "is stopped" if processes.process_state(self.pid) in "Tt" else "does not answer"

    @property
    def position(self) -> str:
        return place_text(self.step, self.phase)

    @property
    def process_name(self) -> str:
        return f"process {self.pid} on {self.host}"


def progress_order(tracker: HeartbeatRecord | ProgressTracker) -> tuple[int, int]:
    """How far along a rank is: who waits for others is in a later phase than who lets them wait."""
    return tracker.step, PHASES.index(tracker.phase) if tracker.phase in PHASES else -1


@dataclass(frozen=True)
class PeerStatus:
    """The other ranks, by whether they are missing, have ended themselves, or live."""

    missing: dict[int, HeartbeatRecord] = field(default_factory=dict)
    ended: dict[int, HeartbeatRecord] = field(default_factory=dict)
    alive: dict[int, HeartbeatRecord] = field(default_factory=dict)

    @property
    def is_hang(self) -> bool | None:
        """Whether the missing are still there (True) or gone (False), where that can be seen."""
        fates = {note.process_state for note in self.missing.values()}
        return False if "is gone" in fates else True if "is stopped" in fates else None

    def __str__(self) -> str:
        """Who is to blame, for people: who is missing, else who ended first, else who is behind."""
        told = [
            f"rank {rank} {note.process_state} ({note.process_name}, last seen in {note.position})"
            for rank, note in self.missing.items()
        ]
        told += [f"rank {rank} ended: {note.ended}" for rank, note in self.ended.items() if not note.follows]
        if not told and self.furthest_behind is not None:
            rank, note = self.furthest_behind
            told = [f"no rank is missing; the furthest behind is rank {rank} ({note.process_name}), in {note.position}"]
        return "; ".join(told) or "the others have ended, because of each other"

    @property
    def furthest_behind(self) -> tuple[int, HeartbeatRecord] | None:
        """Of those that live, or have ended because of another: the one that is furthest behind."""
        present = self.alive | {rank: note for rank, note in self.ended.items() if note.follows}
        return min(present.items(), key=lambda entry: progress_order(entry[1]), default=None)


def place_text(step: int, phase: str) -> str:
    return f"{phase} of update {step + 1}" if step or phase not in ("start", "evaluation") else phase
