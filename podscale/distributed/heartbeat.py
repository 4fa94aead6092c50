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
from dataclasses import asdict
from functools import partial
from typing import Protocol

from podscale.distributed.progress_tracker import HeartbeatRecord, PeerStatus, ProgressTracker
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import FAILED_KEY, Store, StoreError, StoreTimeout

INTERVAL_SECONDS = 1.0
"""Between two notes of a rank; in large worlds more, so that the store never takes over `WRITES` a second."""
MAX_WRITES_PER_SECOND = 1000.0
MISSED_HEARTBEATS = 3.5
"""Notes that a living rank may miss before it counts as missing."""
STORE_TIMEOUT_HEARTBEATS = 5.0
"""Notes in whose time the store answers, or never will."""
HANG_KEY = "pulse/hang"
"""Which rank was the first to call it a hang: then all write down what they were doing."""


class TroubleHandler(Protocol):
    def __call__(self, reason: str, *, hang: bool) -> None: ...


class RankHeartbeat:
    """Writes this rank's notes and reads those of all.

    on_trouble: called once, on a thread of its own, where an update takes longer than the limit of `whereabouts`, and
    where another rank calls it a hang. With `deaf_seconds` also where this rank, once under way, has not got on for as
    long, or where another has ended with an error and this one does not notice: what a rank needs whose collectives
    raise nothing (NCCL's, which wait on the device). interval_seconds: between two notes; default: by the size of the
    world.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        progress_tracker: ProgressTracker,
        *,
        interval_seconds: float | None = None,
        stall_seconds: float | None = None,
        on_trouble: TroubleHandler = lambda reason, *, hang: None,
    ) -> None:
        self._rank_group, self._progress_tracker = rank_group, progress_tracker
        self._interval_seconds = interval_seconds or max(INTERVAL_SECONDS, rank_group.size / MAX_WRITES_PER_SECOND)
        self._store_seconds = STORE_TIMEOUT_HEARTBEATS * self._interval_seconds
        self._stall_seconds, self._on_trouble = stall_seconds, on_trouble
        self._beat = 0
        self._rank0_record: HeartbeatRecord | None = None
        """The newest note of rank 0: the store may end with it."""
        self._stopped = threading.Event()
        self._has_reported = False
        self._is_searching = False
        self._beats_since_failure = 0
        self._write_record(rank_group.store)
        if rank_group.size > 1 or progress_tracker.hang_limit is not None:
            threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def stop(self, reason: str, *, caused_by_peer: bool = False) -> None:
        """Tells the others that this rank ends, and why, so that nobody looks for it; an empty text: it is done.

        caused_by_peer: because of another rank. Then rank 0, with which the store may end, stays until the others have
        looked.
        """
        self._stopped.set()
        stay = caused_by_peer and self._rank_group.rank == 0
        self._run_with_timeout(lambda: self._write_exit(reason, caused_by_peer, stay), self._store_seconds)

    def report_hang(self) -> None:
        """Lets the others know at once, before it is known who is to blame.

        Whoever calls this is about to say more: this rank is not to take its own call for another's.
        """
        self._has_reported = True
        self._run_with_timeout(self._write_hang, self._store_seconds)

    def hang_reported(self) -> bool:
        """Whether any rank calls it a hang."""
        found: list[bool] = []
        self._run_with_timeout(
            lambda: found.append(self._rank_group.store_for_thread(self._store_seconds).has(HANG_KEY)),
            self._store_seconds,
        )
        return any(found)

    def peers(self) -> PeerStatus:
        """How the other ranks are; takes up to `PATIENCE` notes and never hangs."""
        found: list[PeerStatus] = []
        self._run_with_timeout(
            lambda: found.append(self._read_peers()), MISSED_HEARTBEATS * self._interval_seconds + self._store_seconds
        )
        if found:
            return found[0]
        return PeerStatus(missing={0: self._rank0_record}) if self._rank0_record is not None else PeerStatus()

    def _run(self) -> None:
        still, quiet = _UnchangedTimer(), _UnchangedTimer()
        store: Store | None = None
        gone = ""
        ticked = time.monotonic()
        while not self._stopped.wait(self._interval_seconds):
            # What a process that was stopped itself, or whose machine was, does not live through does not count.
            now, before = time.monotonic(), ticked
            ticked, passed = now, min(now - before, 3 * self._interval_seconds)
            self._beat += 1
            at = self._progress_tracker
            quiet_seconds = quiet.update(passed, at.step_changes) if at.in_step else 0.0
            still_seconds = still.update(passed, at.changes)
            self._check_timeouts(quiet_seconds, still_seconds)
            if gone:
                self._check_lost_store(gone, still_seconds)
                continue
            try:
                store = store or self._rank_group.store_for_thread(self._store_seconds)
                self._write_record(store)
                if self._rank_group.rank != 0:
                    self._rank0_record = _read_records(store, [0])[0]
                self._check_peers(store, still_seconds)
            except StoreTimeout:
                continue  # rank 0 has not said anything yet
            except StoreError as error:
                gone = str(error)

    def _check_lost_store(self, gone: str, still_seconds: float) -> None:
        """Nobody can say any more how the others are; with the store its whole pod may be gone."""
        if self._stall_seconds is not None and still_seconds > MISSED_HEARTBEATS * self._interval_seconds:
            self._report_trouble(gone, hang=False)

    def _check_timeouts(self, quiet_seconds: float, still_seconds: float) -> None:
        """Speaks up for a main thread that does not get on.

        quiet_seconds: since the last update, while it is in one; still_seconds: since it last moved.
        """
        at, deaf = self._progress_tracker, self._stall_seconds
        if at.hang_limit is not None and quiet_seconds > (limit := at.hang_limit.seconds):
            self._report_trouble(
                f"there was no update for {quiet_seconds:.0f} s (the limit is {limit:.0f} s)", hang=True
            )
        elif deaf is not None and still_seconds > deaf and at.first_step_done:
            self._report_trouble(f"nothing has moved here for {still_seconds:.0f} s", hang=True)

    def _check_peers(self, store: Store, still_seconds: float) -> None:
        """Speaks up for a main thread that hears nothing of what has become of the others."""
        deaf = self._stall_seconds
        if still_seconds > MISSED_HEARTBEATS * self._interval_seconds:
            if store.has(HANG_KEY):
                self._report_trouble(f"rank {store.get([HANG_KEY])[0]} calls it a hang", hang=True)
            elif deaf is not None and store.has(FAILED_KEY):
                self._beats_since_failure += 1
                if (
                    self._beats_since_failure > MISSED_HEARTBEATS
                ):  # the main thread may be about to hear of it, and knows more
                    self._report_trouble(f"rank {store.get([FAILED_KEY])[0]} has failed", hang=False)
            elif deaf is not None and still_seconds > deaf and not self._is_searching:  # the network is being compiled?
                self._is_searching = True
                threading.Thread(
                    target=self._search_missing, args=(still_seconds,), name="look-out", daemon=True
                ).start()

    def _search_missing(self, still_seconds: float) -> None:
        """Speaks up where another rank is missing; on a thread of its own, because it takes a while."""
        with suppress(StoreError):
            if self._read_peers().missing:
                self._report_trouble(f"nothing has moved here for {still_seconds:.0f} s", hang=True)
        self._is_searching = False

    def _report_trouble(self, reason: str, *, hang: bool) -> None:
        """Once, and on a thread of its own: this one goes on writing notes, lest others take this rank for missing."""
        if not self._has_reported:
            self._has_reported = True
            work = partial(self._on_trouble, reason, hang=hang)
            threading.Thread(target=work, name="trouble", daemon=True).start()

    def _write_hang(self) -> None:
        store = self._rank_group.store_for_thread(self._store_seconds)
        if not store.has(HANG_KEY):
            store.set(HANG_KEY, str(self._rank_group.rank))

    def _write_exit(self, ended: str, follows: bool, stay: bool) -> None:
        store = self._rank_group.store_for_thread(self._store_seconds)
        self._beat += 1
        self._write_record(store, ended or "it is done", follows=follows)
        if ended and not follows:
            store.set(FAILED_KEY, str(self._rank_group.rank))
        while stay and self._read_peers().alive:
            time.sleep(self._interval_seconds / 4)

    def _read_peers(self) -> PeerStatus:
        """Looks at the notes until each has changed, or should have."""
        store = self._rank_group.store_for_thread(self._store_seconds)
        others = [rank for rank in range(self._rank_group.size) if rank != self._rank_group.rank]
        first, deadline = _read_records(store, others), time.monotonic() + MISSED_HEARTBEATS * self._interval_seconds
        while True:
            now = _read_records(store, others)
            ended = {rank: note for rank, note in now.items() if note.ended}
            same = {rank: note for rank, note in now.items() if rank not in ended and note.beat == first[rank].beat}
            if not same or time.monotonic() > deadline:
                alive = {rank: note for rank, note in now.items() if rank not in ended and rank not in same}
                return PeerStatus(missing=same, ended=ended, alive=alive)
            time.sleep(self._interval_seconds / 4)

    def _run_with_timeout(self, work: Callable[[], None], seconds: float) -> None:
        """The store's host may be the one that hangs, and then no timeout of its client helps."""

        def run() -> None:
            with suppress(StoreError):
                work()

        thread = threading.Thread(target=run, name="pulse-store", daemon=True)
        thread.start()
        thread.join(seconds)

    def _write_record(self, store: Store, ended: str = "", *, follows: bool = False) -> None:
        at = self._progress_tracker
        note = HeartbeatRecord(self._beat, at.step, at.phase, socket.gethostname(), os.getpid(), ended, follows)
        store.set(_record_key(self._rank_group.rank), json.dumps(asdict(note)))


class _UnchangedTimer:
    """Seconds since a number last changed."""

    def __init__(self) -> None:
        self._number, self._seconds = -1, 0.0

    def update(self, passed: float, number: int) -> float:
        """`passed`: seconds since the call before."""
        self._seconds = self._seconds + passed if number == self._number else 0.0
        self._number = number
        return self._seconds


def _record_key(rank: int) -> str:
    return f"pulse/{rank}"


def _read_records(store: Store, ranks: list[int]) -> dict[int, HeartbeatRecord]:
    texts = store.get([_record_key(rank) for rank in ranks])
    return {rank: HeartbeatRecord(**json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}
