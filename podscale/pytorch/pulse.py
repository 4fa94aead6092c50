"""Who is where: each rank tells the others once a second, so that a failure can name the rank that is missing.

A collective that fails knows only that somebody did not come. The notes of all ranks stand in the store of the
meeting; a rank that waits in vain looks at them twice and knows whose no longer change. Clocks are never compared.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Protocol

from torch._C._distributed_c10d import Store

from podscale.pytorch.meeting import Meeting

SECONDS = 1.0
"""Between two notes of a rank; in large worlds more, so that the store never takes over `WRITES` a second."""
WRITES = 1000.0
PATIENCE = 3.5
"""Notes that a living rank may miss before it counts as missing."""
STORE_SECONDS = 5.0
"""An answer of the store that takes longer never comes."""
FAILED = "pulse/failed"


class Whereabouts:
    """What a rank is doing: the phase (names in telemetry.phases) of the update after `step` updates."""

    def __init__(self) -> None:
        self.step, self.phase = 0, "start"
        self.changes = 0
        """Rises with every change: a rank whose number stands still does not get on."""

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.changes += 1

    @property
    def place(self) -> str:
        """For people."""
        return place(self.step, self.phase)

    def updated(self, step: int) -> None:
        self.step = step
        self.changes += 1


def place(step: int, phase: str) -> str:
    """Where a rank is that has done `step` updates, for people."""
    return f"{phase} of update {step + 1}" if step or phase not in ("start", "evaluation") else phase


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
    def place(self) -> str:
        return place(self.step, self.phase)


@dataclass(frozen=True)
class Census:
    """The ranks by how they answer. reachable: whether the store itself does."""

    missing: dict[int, Note] = field(default_factory=dict)
    ended: dict[int, Note] = field(default_factory=dict)
    alive: dict[int, Note] = field(default_factory=dict)
    reachable: bool = True

    def __str__(self) -> str:
        """Who is to blame, for people: who is missing, else who ended first, else who is behind."""
        if not self.reachable:
            return "the machine of rank 0, which keeps the ranks' notes, does not answer, so rank 0 is missing"
        told = [
            f"rank {rank} does not answer (process {note.pid} on {note.host}, last seen in {note.place})"
            for rank, note in self.missing.items()
        ]
        told += [f"rank {rank} ended: {note.ended}" for rank, note in self.ended.items() if not note.follows]
        if not told and self.alive:
            rank, note = min(self.alive.items(), key=lambda entry: entry[1].step)
            told = [f"no rank is missing; the furthest behind is rank {rank}, in {note.place}"]
        return "; ".join(told) or "all other ranks have ended, because of each other"


class Trouble(Protocol):
    def __call__(self, reason: str, *, hang: bool) -> None: ...


class Pulse:
    """Writes this rank's notes and reads those of all.

    on_trouble: called on the pulse's thread where this rank has not got on for `deaf_seconds`, or where
    another has ended with an error and this one does not notice: what a rank needs whose collectives raise nothing
    (NCCL's, which wait on the device).
    """

    def __init__(
        self,
        meeting: Meeting,
        whereabouts: Whereabouts,
        *,
        seconds: float | None = None,
        deaf_seconds: float | None = None,
        on_trouble: Trouble = lambda reason, *, hang: None,
    ) -> None:
        self._meeting, self._whereabouts = meeting, whereabouts
        self._seconds = seconds or max(SECONDS, meeting.size / WRITES)
        self._deaf_seconds, self._on_trouble = deaf_seconds, on_trouble
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._beat = 0
        self._over = threading.Event()
        self._write(meeting.store)
        if meeting.size > 1:
            threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def last_words(self, ended: str, *, follows: bool = False) -> None:
        """Tells the others that this rank ends, and why, so that nobody looks for it; an empty text: it is done.

        follows: because of another rank. Then rank 0, with which the store may end, stays until the others have looked.
        """
        self._over.set()
        self._bounded(lambda: self._say(ended, follows=follows), STORE_SECONDS)

    def _say(self, ended: str, *, follows: bool) -> None:
        store = self._meeting.own_store(STORE_SECONDS)
        self._beat += 1
        self._write(store, ended or "it is done", follows=follows)
        if ended:
            store.set(FAILED, str(self._meeting.rank))
        if follows and self._meeting.rank == 0:
            deadline = time.monotonic() + PATIENCE * self._seconds
            while self._look().alive and time.monotonic() < deadline:
                pass

    def census(self) -> Census:
        """How the other ranks answer; takes up to `PATIENCE` notes and never hangs."""
        found: list[Census] = []
        self._bounded(lambda: found.append(self._look()), (PATIENCE + 1) * self._seconds + STORE_SECONDS)
        return found[0] if found else Census(reachable=False)

    def _bounded(self, work: Callable[[], None], seconds: float) -> None:
        """The store's host may be the one that hangs, and then no timeout of its client helps."""

        def run() -> None:
            with suppress(RuntimeError):
                work()

        thread = threading.Thread(target=run, name="pulse-store", daemon=True)
        thread.start()
        thread.join(seconds)

    def _look(self) -> Census:
        store = self._meeting.own_store(STORE_SECONDS)
        others = [rank for rank in range(self._meeting.size) if rank != self._meeting.rank]
        keys = [_key(rank) for rank in others]

        def notes() -> dict[int, Note]:
            return {r: Note(**json.loads(text)) for r, text in zip(others, store.multi_get(keys), strict=True)}

        first, deadline = notes(), time.monotonic() + PATIENCE * self._seconds
        while True:
            now = notes()
            ended = {rank: note for rank, note in now.items() if note.ended}
            same = {rank: note for rank, note in now.items() if rank not in ended and note.beat == first[rank].beat}
            if not same or time.monotonic() > deadline:
                alive = {rank: note for rank, note in now.items() if rank not in ended and rank not in same}
                return Census(missing=same, ended=ended, alive=alive)
            time.sleep(self._seconds / 4)

    def _run(self) -> None:
        store = self._meeting.own_store(STORE_SECONDS)
        changes, since = -1, time.monotonic()
        with suppress(RuntimeError):  # the store is gone, and with it whoever would read
            while not self._over.wait(self._seconds):
                self._beat += 1
                self._write(store)
                if self._whereabouts.changes != changes:
                    changes, since = self._whereabouts.changes, time.monotonic()
                self._listen(store, time.monotonic() - since)

    def _listen(self, store: Store, still_seconds: float) -> None:
        """Speaks up for a main thread that hears nothing."""
        if self._deaf_seconds is None:
            return
        if still_seconds > self._deaf_seconds:
            self._on_trouble(f"nothing has moved here for {still_seconds:.0f} s", hang=True)
        elif still_seconds > PATIENCE * self._seconds and store.check([FAILED]):
            self._on_trouble(f"rank {store.get(FAILED).decode()} has failed", hang=False)

    def _write(self, store: Store, ended: str = "", *, follows: bool = False) -> None:
        at = self._whereabouts
        note = Note(self._beat, at.step, at.phase, self._host, self._pid, ended, follows)
        store.set(_key(self._meeting.rank), json.dumps(asdict(note)))


def _key(rank: int) -> str:
    return f"pulse/{rank}"
