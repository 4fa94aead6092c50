"""What the ranks say of themselves while they work, and what can be read from all of it after a failure."""

import socket
from dataclasses import dataclass, field

from podscale import processes


class Whereabouts:
    """What a rank is doing: the phase (names in telemetry.phases) of the update after `step` updates."""

    def __init__(self) -> None:
        self.step, self.phase = 0, "start"
        self.changes = 0
        """Rises with every sign of progress: a rank whose number stands still does not get on."""
        self.under_way = False
        """Whether an update was done in this launch: the first may take long, for the network is compiled in it."""

    def begin(self, step: int) -> None:
        """The training goes on after `step` updates."""
        self.step = step
        self.changes += 1

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.changes += 1

    def tick(self) -> None:
        """Some progress inside a phase."""
        self.changes += 1

    def updated(self, step: int) -> None:
        self.step = step
        self.under_way = True
        self.changes += 1

    def __str__(self) -> str:
        return _place(self.step, self.phase)


@dataclass(frozen=True)
class Note:
    """What a rank says of itself; `ended`: why it ends, empty while it lives; `follows`: only because of another."""

    beat: int
    step: int
    phase: str
    host: str
    pid: int
    ended: str = ""
    follows: bool = False

    @property
    def fate(self) -> str:
        """What has become of a process that no longer writes: seen on the same host, unknown elsewhere."""
        if self.host != socket.gethostname():
            return "does not answer"
        if not processes.alive(self.pid):
            return "is gone"
        return "is stopped" if processes.state(self.pid) in "Tt" else "does not answer"

    @property
    def place(self) -> str:
        return _place(self.step, self.phase)


@dataclass(frozen=True)
class Census:
    """The other ranks, by whether they are missing, have ended themselves, or live."""

    missing: dict[int, Note] = field(default_factory=dict)
    ended: dict[int, Note] = field(default_factory=dict)
    alive: dict[int, Note] = field(default_factory=dict)

    @property
    def hang(self) -> bool | None:
        """Whether the missing are still there (True) or gone (False), where that can be seen."""
        fates = {note.fate for note in self.missing.values()}
        return False if "is gone" in fates else True if "is stopped" in fates else None

    def __str__(self) -> str:
        """Who is to blame, for people: who is missing, else who ended first, else who is behind."""
        told = [
            f"rank {rank} {note.fate} (process {note.pid} on {note.host}, last seen in {note.place})"
            for rank, note in self.missing.items()
        ]
        told += [f"rank {rank} ended: {note.ended}" for rank, note in self.ended.items() if not note.follows]
        if not told and self.alive:
            rank, note = min(self.alive.items(), key=lambda entry: entry[1].step)
            told = [f"no rank is missing; the furthest behind is rank {rank}, in {note.place}"]
        return "; ".join(told) or "the others have ended, because of each other"


def _place(step: int, phase: str) -> str:
    return f"{phase} of update {step + 1}" if step or phase not in ("start", "evaluation") else phase
