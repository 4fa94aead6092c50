"""Progress of a rank, the heartbeat record it writes, the hang limit of a step, and the status of its peers."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from podscale.telemetry.phases import PHASES
from podscale.telemetry.registry import MetricSample
from podscale.util import processes

P99_MULTIPLE = 10.0
"""Hang threshold as a multiple of the p99 step time."""
MIN_STEPS = 10
"""Step times needed before the p99 is used."""
WINDOW_STEPS = 256
"""Number of newest step times in the p99."""


class HangLimit:
    """Longest time of a step before it counts as a hang, learned from the step times of this launch.

    The limit is `max_seconds` for the first `MIN_STEPS` steps, then `P99_MULTIPLE` times their 99th percentile, between
    `min_seconds` and `max_seconds`. One thread adds times; others read the limit about once a second.
    """

    def __init__(self, min_seconds: float, max_seconds: float) -> None:
        self._min_seconds, self._max_seconds = min(min_seconds, max_seconds), max_seconds
        self._recent: list[float] = []
        self._added = 0

    def add(self, seconds: float) -> None:
        """Record the time of one step, seconds."""
        if len(self._recent) < WINDOW_STEPS:
            self._recent.append(seconds)
        else:
            self._recent[self._added % WINDOW_STEPS] = seconds
        self._added += 1

    def clear(self) -> None:
        """Forget the step times, so that the limit is `max_seconds` again."""
        self._recent, self._added = [], 0

    @property
    def seconds(self) -> float:
        recent = sorted(self._recent)
        if len(recent) < MIN_STEPS:
            return self._max_seconds
        return min(self._max_seconds, max(self._min_seconds, P99_MULTIPLE * recent[(len(recent) - 1) * 99 // 100]))

    def samples(self) -> Iterator[MetricSample]:
        yield "train_hang_limit_seconds", (), self.seconds


UNTIMED_PHASES = ("start", "checkpoint", "evaluation")
"""Phases outside of a step: the hang limit does not apply to them."""


class ProgressTracker:
    """Progress of a rank: the number of finished steps and the current phase (see telemetry.phases)."""

    def __init__(self, limit: HangLimit | None = None) -> None:
        self.step, self.phase = 0, "start"
        self.device = ""
        """Number, name and address of the rank's GPU, for errors; "" on a CPU, and until the rank has joined."""
        self.hang_limit = limit
        """Limit of one step; None: hangs are not detected."""
        self.step_changes = 0
        """Counter of finished steps and of phases outside of a step."""
        self.changes = 0
        """Counter of every sign of progress: while it is constant, the rank makes no progress."""
        self.first_step_done = False
        """True after the first step of a launch or a batch size, which takes longer because it compiles the network."""

    def start(self, step: int) -> None:
        """Set the step that training continues from."""
        self.step = step
        self.changes += 1

    def batch_changed(self) -> None:
        """Expect steps of other times, the first of which compiles the network."""
        self.first_step_done = False
        if self.hang_limit is not None:
            self.hang_limit.clear()

    @property
    def in_step(self) -> bool:
        """True inside a step other than the first, which compiles the network."""
        return self.first_step_done and self.phase not in UNTIMED_PHASES

    def enter_phase(self, phase: str) -> None:
        if self.phase in UNTIMED_PHASES:
            self.step_changes += 1
        self.phase = phase
        self.changes += 1

    def touch(self) -> None:
        """Record progress inside a phase."""
        self.changes += 1

    def step_done(self, step: int, seconds: float | None = None) -> None:
        """Record a finished step, and its time in seconds if known."""
        if self.hang_limit is not None and self.first_step_done and seconds is not None:
            self.hang_limit.add(seconds)
        self.step = step
        self.first_step_done = True
        self.changes += 1
        self.step_changes += 1

    def __str__(self) -> str:
        return _position_text(self.step, self.phase)


@dataclass(frozen=True)
class HeartbeatRecord:
    """Heartbeat of a rank: `ended` is the reason of its exit ("" while it runs), `follows` True if a peer caused it."""

    beat: int
    step: int
    phase: str
    host: str
    pid: int
    ended: str = ""
    follows: bool = False

    @property
    def process_state(self) -> str:
        """State of a process that no longer writes, as text; known on the same host only."""
        if self.host != socket.gethostname():
            return "does not answer"
        if not processes.is_alive(self.pid):
            return "is gone"
        return "is stopped" if processes.process_state(self.pid) in "Tt" else "does not answer"

    @property
    def position(self) -> str:
        return _position_text(self.step, self.phase)

    @property
    def process_name(self) -> str:
        return f"process {self.pid} on {self.host}"


def progress_order(tracker: HeartbeatRecord | ProgressTracker) -> tuple[int, int]:
    """Return a sort key of progress: a rank that waits is in a later phase than the rank it waits for."""
    return tracker.step, PHASES.index(tracker.phase) if tracker.phase in PHASES else -1


@dataclass(frozen=True)
class PeerStatus:
    """Records of the other ranks: missing, exited, or alive."""

    missing: dict[int, HeartbeatRecord] = field(default_factory=dict)
    ended: dict[int, HeartbeatRecord] = field(default_factory=dict)
    alive: dict[int, HeartbeatRecord] = field(default_factory=dict)

    @property
    def is_hang(self) -> bool | None:
        """True if a missing rank is stopped, False if one is gone, None if that is unknown."""
        states = {record.process_state for record in self.missing.values()}
        return False if "is gone" in states else True if "is stopped" in states else None

    def __str__(self) -> str:
        """Describe the culprit: the missing ranks, else the first that exited, else the furthest behind."""
        parts = [
            f"rank {rank} {record.process_state} ({record.process_name}, last seen in {record.position})"
            for rank, record in self.missing.items()
        ]
        parts += [f"rank {rank} exited: {record.ended}" for rank, record in self.ended.items() if not record.follows]
        if not parts and self.furthest_behind is not None:
            rank, record = self.furthest_behind
            parts = [
                f"no rank is missing; the furthest behind is rank {rank} ({record.process_name}), in {record.position}"
            ]
        return "; ".join(parts) or "the other ranks exited because of each other"

    @property
    def furthest_behind(self) -> tuple[int, HeartbeatRecord] | None:
        """Return the rank with the least progress among those alive or exited because of another rank."""
        present = self.alive | {rank: record for rank, record in self.ended.items() if record.follows}
        return min(present.items(), key=lambda entry: progress_order(entry[1]), default=None)


def _position_text(step: int, phase: str) -> str:
    return f"{phase} of step {step + 1}" if step or phase not in ("start", "evaluation") else phase
