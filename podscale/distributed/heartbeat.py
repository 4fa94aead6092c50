"""Heartbeats between ranks, so that an error can name the missing rank.

Each rank writes a record of its progress to the store about once a second. A rank whose collective fails reads all
records twice: a rank whose record did not change is missing. Clocks of different hosts are never compared.
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
from typing import Protocol, TypeVar

from podscale.distributed.progress_tracker import HeartbeatRecord, PeerStatus, ProgressTracker
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import FAILED_KEY, Store, StoreError, StoreTimeout
from podscale.util.processes import call_with_timeout

INTERVAL_SECONDS = 1.0
"""Heartbeat interval, seconds; longer in large worlds, see `MAX_WRITES_PER_SECOND`."""
MAX_WRITES_PER_SECOND = 1000.0
"""Maximum rate of the heartbeats of all ranks together, per second."""
MISSED_HEARTBEATS = 3.5
"""Heartbeats without a change after which a rank counts as missing."""
STORE_TIMEOUT_HEARTBEATS = 5.0
"""Store timeout, in heartbeats."""
HANG_KEY = "pulse/hang"
"""Store key of the first rank that detected a hang; all ranks then dump their stacks."""

T = TypeVar("T")


class FailureHandler(Protocol):
    """Callback for a hang or a lost peer, with the reason as text."""

    def __call__(self, reason: str, *, hang: bool) -> None: ...


class RankHeartbeat:
    """Heartbeat thread of one rank: writes its record and checks those of its peers.

    Args:
        stall_seconds: Longest time without progress before the peers are checked, for collectives that raise no error
            (NCCL's, which wait on the device). A peer's failure is then reported too. None: collectives raise errors.
        on_failure: Called once, on its own thread, when a step exceeds the tracker's hang limit, when another rank
            reports a hang, or when `stall_seconds` found a missing peer.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        progress_tracker: ProgressTracker,
        *,
        interval_seconds: float | None = None,
        stall_seconds: float | None = None,
        on_failure: FailureHandler = lambda reason, *, hang: None,
    ) -> None:
        self._rank_group, self._progress_tracker = rank_group, progress_tracker
        self._interval_seconds = interval_seconds or max(INTERVAL_SECONDS, rank_group.size / MAX_WRITES_PER_SECOND)
        self._missed_seconds = MISSED_HEARTBEATS * self._interval_seconds
        self._store_seconds = STORE_TIMEOUT_HEARTBEATS * self._interval_seconds
        self._stall_seconds, self._on_failure = stall_seconds, on_failure
        self._beat = 0
        self._rank0_record: HeartbeatRecord | None = None
        """Newest record of rank 0; kept because the store may be lost together with rank 0."""
        self._stopped = threading.Event()
        self._has_reported = False
        self._is_searching = False
        self._beats_since_failure = 0
        self._write_record(rank_group.store)
        if rank_group.size > 1 or progress_tracker.hang_limit is not None:
            threading.Thread(target=self._run, name="rank-heartbeat", daemon=True).start()

    def stop(self, reason: str, *, caused_by_peer: bool = False) -> None:
        """Stop the heartbeat and record why this rank exits, so that its peers do not report it missing.

        `reason` is empty if the rank finished. With `caused_by_peer`, rank 0 waits until its peers have read the
        records, because the store may be lost together with rank 0.
        """
        self._stopped.set()

        def write_exit(store: Store) -> None:
            self._beat += 1
            self._write_record(store, reason or "it finished", follows=caused_by_peer)
            if reason and not caused_by_peer:
                store.set(FAILED_KEY, str(self._rank_group.rank))
            while caused_by_peer and self._rank_group.rank == 0 and self._read_peers(store).alive:
                time.sleep(self._interval_seconds / 4)

        self._ask_store(write_exit, None, self._store_seconds)

    def report_hang(self) -> None:
        """Report a hang to all ranks before its cause is known; this rank then no longer calls `on_failure`."""
        self._has_reported = True

        def write_hang(store: Store) -> None:
            if not store.has(HANG_KEY):
                store.set(HANG_KEY, str(self._rank_group.rank))

        self._ask_store(write_hang, None, self._store_seconds)

    def hang_reported(self) -> bool:
        return self._ask_store(lambda store: store.has(HANG_KEY), False, self._store_seconds)

    def peers(self) -> PeerStatus:
        """Return the status of the other ranks; takes up to `MISSED_HEARTBEATS` intervals and never hangs."""
        default = PeerStatus(missing={0: self._rank0_record} if self._rank0_record is not None else {})
        return self._ask_store(self._read_peers, default, self._missed_seconds + self._store_seconds)

    def _ask_store(self, action: Callable[[Store], T], default: T, seconds: float) -> T:
        """Return the result of `action`, or `default` after `seconds`: the client's timeout fails if a host hangs."""
        try:
            store_seconds = self._store_seconds
            return call_with_timeout(seconds, lambda: action(self._rank_group.store_for_thread(store_seconds)))
        except (StoreError, TimeoutError):
            return default

    def _run(self) -> None:
        progress_timer, step_timer = _UnchangedTimer(), _UnchangedTimer()
        store: Store | None = None
        store_error = ""
        last_tick = time.monotonic()
        while not self._stopped.wait(self._interval_seconds):
            # Time in which this process or its host was suspended does not count as a hang.
            now, before = time.monotonic(), last_tick
            last_tick, passed = now, min(now - before, 3 * self._interval_seconds)
            self._beat += 1
            tracker = self._progress_tracker
            step_seconds = step_timer.update(passed, tracker.step_changes) if tracker.in_step else 0.0
            still_seconds = progress_timer.update(passed, tracker.changes)
            self._check_timeouts(step_seconds, still_seconds)
            if store_error:
                # The whole pod of the store may be gone: a failure if this rank makes no progress either.
                if self._stall_seconds is not None and still_seconds > self._missed_seconds:
                    self._report_failure(store_error, hang=False)
                continue
            try:
                store = store or self._rank_group.store_for_thread(self._store_seconds)
                self._write_record(store)
                if self._rank_group.rank != 0:
                    self._rank0_record = _read_records(store, [0])[0]
                if still_seconds > self._missed_seconds:
                    self._check_peers(store, still_seconds)
            except StoreTimeout:
                continue  # rank 0 has not written a record yet
            except StoreError as error:
                store_error = str(error)

    def _check_timeouts(self, step_seconds: float, still_seconds: float) -> None:
        """Report a hang, given the seconds since the last step (0 outside of a step) and since any progress."""
        tracker, stall_seconds = self._progress_tracker, self._stall_seconds
        if tracker.hang_limit is not None and step_seconds > (limit := tracker.hang_limit.seconds):
            self._report_failure(f"no step finished for {step_seconds:.0f} s (the limit is {limit:.0f} s)", hang=True)
        elif stall_seconds is not None and still_seconds > stall_seconds and tracker.first_step_done:
            self._report_failure(f"no progress here for {still_seconds:.0f} s", hang=True)

    def _check_peers(self, store: Store, still_seconds: float) -> None:
        """Report a hang or failure of a peer; the main thread of this rank makes no progress."""
        stall_seconds = self._stall_seconds
        if store.has(HANG_KEY):
            self._report_failure(f"rank {store.get([HANG_KEY])[0]} reported a hang", hang=True)
        elif stall_seconds is not None and store.has(FAILED_KEY):
            self._beats_since_failure += 1
            # The main thread may be about to raise the error, which is more precise.
            if self._beats_since_failure > MISSED_HEARTBEATS:
                self._report_failure(f"rank {store.get([FAILED_KEY])[0]} has failed", hang=False)
        elif stall_seconds is not None and still_seconds > stall_seconds and not self._is_searching:
            # The step may still be compiling: report only if a peer is missing.
            self._is_searching = True
            threading.Thread(
                target=self._search_missing, args=(still_seconds,), name="rank-heartbeat-search", daemon=True
            ).start()

    def _search_missing(self, still_seconds: float) -> None:
        """Report a stall if a peer is missing; takes several intervals, so it has its own thread."""
        with suppress(StoreError):
            if self._read_peers(self._rank_group.store_for_thread(self._store_seconds)).missing:
                self._report_failure(f"no progress here for {still_seconds:.0f} s", hang=True)
        self._is_searching = False

    def _report_failure(self, reason: str, *, hang: bool) -> None:
        """Call `on_failure` once, on its own thread: this thread must go on writing heartbeats."""
        if not self._has_reported:
            self._has_reported = True
            handler = partial(self._on_failure, reason, hang=hang)
            threading.Thread(target=handler, name="rank-failure", daemon=True).start()

    def _read_peers(self, store: Store) -> PeerStatus:
        """Read the records until each has changed, or has missed `MISSED_HEARTBEATS` heartbeats."""
        others = [rank for rank in range(self._rank_group.size) if rank != self._rank_group.rank]
        first, deadline = _read_records(store, others), time.monotonic() + self._missed_seconds
        while True:
            now = _read_records(store, others)
            ended = {rank: record for rank, record in now.items() if record.ended}
            running = {rank: record for rank, record in now.items() if not record.ended}
            same = {rank: record for rank, record in running.items() if record.beat == first[rank].beat}
            if not same or time.monotonic() > deadline:
                alive = {rank: record for rank, record in running.items() if rank not in same}
                return PeerStatus(missing=same, ended=ended, alive=alive)
            time.sleep(self._interval_seconds / 4)

    def _write_record(self, store: Store, ended: str = "", *, follows: bool = False) -> None:
        tracker = self._progress_tracker
        record = HeartbeatRecord(
            self._beat, tracker.step, tracker.phase, socket.gethostname(), os.getpid(), ended, follows
        )
        store.set(_record_key(self._rank_group.rank), json.dumps(asdict(record)))


class _UnchangedTimer:
    """Timer of the seconds since a number last changed."""

    def __init__(self) -> None:
        self._number, self._seconds = -1, 0.0

    def update(self, passed: float, number: int) -> float:
        """Return the seconds since `number` changed; `passed` is the time since the call before, seconds."""
        self._seconds = self._seconds + passed if number == self._number else 0.0
        self._number = number
        return self._seconds


def _record_key(rank: int) -> str:
    return f"pulse/{rank}"


def _read_records(store: Store, ranks: list[int]) -> dict[int, HeartbeatRecord]:
    texts = store.get([_record_key(rank) for rank in ranks])
    return {rank: HeartbeatRecord(**json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}
