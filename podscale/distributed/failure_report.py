"""Report a failed collective or a hang: name the collective and the missing rank, and dump the stacks of this rank.

`watch_peers` wraps a training. When a rank dies, its peers' collectives fail or hang. Each peer then reads the
heartbeats (see `heartbeat`), raises HangDetected or PeerLost with the culprit's name, and exits. The launcher decides
on a restart (see `launch.supervisor`).
"""

import faulthandler
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from podscale.distributed.heartbeat import RankHeartbeat
from podscale.distributed.progress_tracker import HangLimit, PeerStatus, ProgressTracker, progress_order
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.waits import current_wait, wait_of
from podscale.errors import HangDetected, PeerLost, PodscaleError, Preempted

logger = logging.getLogger(__name__)


FlightRecorder = Callable[[Path], str]
"""Function that writes the state of an engine's collectives to a file and returns one line for the stack dump."""

ErrorClassifier = Callable[[BaseException], type[PodscaleError] | None]
"""Function that returns HangDetected or PeerLost for an error caused by another rank, else None."""

COLLECTIVE_GRACE_SECONDS = 5.0
"""Extra time before the clock reports a hang, seconds: the error of a collective says more than the clock."""


def dump_stacks(
    directory: Path,
    rank: int,
    reason: str,
    failure: BaseException | None = None,
    flight_recorder: FlightRecorder | None = None,
) -> None:
    """Append the stacks of all threads to rank-<k>.txt, and write the recorder's state to rank-<k>.flight.json.

    An unwritable directory is logged, not raised.

    Args:
        directory: Directory of the dumps, created if needed.
        rank: Rank of this process.
        reason: Text of the first line.
        failure: Error that the main thread raised, with its own traceback.
        flight_recorder: Writer of the state of the engine's collectives.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"rank-{rank}.txt").open("a", encoding="utf-8") as file:
            now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            file.write(f"{now} UTC, rank {rank}, process {os.getpid()} on {socket.gethostname()}: {reason}\n")
            file.writelines(traceback.format_exception(failure) if failure is not None else [])
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(
                (flight_recorder(directory / f"rank-{rank}.flight.json") if flight_recorder is not None else "")
                + "\n\n"
            )
    except OSError as error:
        logger.warning("%s: the stacks of this rank are not kept: %s", directory, error.strerror)


@contextmanager
def watch_peers(
    rank_group: RankGroup,
    exit_process: Callable[[PodscaleError], None],
    *,
    classify_error: ErrorClassifier,
    silent_collectives: bool,
    interval_seconds: float | None = None,
    hang_seconds: float | None = None,
    stack_directory: Path | None = None,
    flight_recorder: FlightRecorder | None = None,
) -> Iterator[ProgressTracker]:
    """Send heartbeats inside the block, and raise errors caused by another rank with that rank's name.

    Args:
        rank_group: Ranks of the run and their store.
        exit_process: Reports an error and exits this process; called on another thread when the main thread hangs.
        classify_error: Tells errors caused by another rank from those of this rank.
        silent_collectives: Collectives wait on the device and raise no error (NCCL's).
        interval_seconds: Time between two heartbeats.
        hang_seconds: Shortest time without a step that counts as a hang; None: hangs are not detected.
        stack_directory: Directory for the stacks of every rank after a hang.
        flight_recorder: Writer of the state of the engine's collectives, for the stack dump.
    """
    stall_seconds = rank_group.timeout_seconds if silent_collectives else None
    max_seconds = rank_group.timeout_seconds + (0.0 if silent_collectives else COLLECTIVE_GRACE_SECONDS)
    progress_tracker = ProgressTracker(None if hang_seconds is None else HangLimit(hang_seconds, max_seconds))
    report_lock = threading.Lock()

    def handle_trouble(reason: str, *, hang: bool) -> None:
        with report_lock:
            if hang:
                report_hang(reason)
            kind = HangDetected if hang else PeerLost
            error = explain(kind, current_wait() or f"phase {progress_tracker.phase}", reason)
            heartbeat.stop(str(error), caused_by_peer=True)
            exit_process(error)

    def report_hang(reason: str, failure: BaseException | None = None) -> None:
        heartbeat.report_hang()
        if stack_directory is not None:
            dump_stacks(stack_directory, rank_group.rank, f"{reason}, in {progress_tracker}", failure, flight_recorder)

    def explain(kind: type[PodscaleError], collective: str, reason: str) -> PodscaleError:
        return _peer_error(kind, collective, reason, rank_group, progress_tracker, heartbeat.peers(), stack_directory)

    heartbeat = RankHeartbeat(
        rank_group,
        progress_tracker,
        interval_seconds=interval_seconds,
        stall_seconds=stall_seconds,
        on_trouble=handle_trouble,
    )
    try:
        yield progress_tracker
    except Preempted:
        heartbeat.stop("")
        raise
    except BaseException as failure:
        with report_lock:
            pass  # another thread reports a more precise error and exits this process
        kind = classify_error(failure)
        if kind is HangDetected or (kind is PeerLost and heartbeat.hang_reported()):
            kind = HangDetected
            report_hang(_last_line(failure), failure)
        explained = explain(kind, wait_of(failure) or "a collective", _last_line(failure)) if kind is not None else None
        # An error of these types was already reported in full by the code that raised it.
        follows = explained is not None or isinstance(failure, HangDetected | PeerLost)
        heartbeat.stop(str(failure) or type(failure).__name__, caused_by_peer=follows)
        if explained is not None:
            raise explained from failure
        raise
    heartbeat.stop("")


def _peer_error(
    kind: type[PodscaleError],
    collective: str,
    reason: str,
    rank_group: RankGroup,
    tracker: ProgressTracker,
    peers: PeerStatus,
    stack_directory: Path | None,
) -> PodscaleError:
    """Return the error that names the culprit.

    Args:
        kind: Type from the backend, which cannot tell a stopped peer from one that exited because of another rank.
        collective: Name of the wait that failed.
        reason: Last line of the backend's error, or the heartbeat's reason.
        rank_group: Ranks of the run.
        tracker: Progress of this rank.
        peers: Status of the other ranks; overrides `kind` when it is known.
        stack_directory: Directory of the stack dumps, named in the advice.
    """
    hang = kind is HangDetected if peers.is_hang is None else peers.is_hang
    this_rank = f"rank {rank_group.rank} of {rank_group.size}"
    if (
        hang
        and not peers.missing
        and (peers.furthest_behind is None or progress_order(tracker) < progress_order(peers.furthest_behind[1]))
    ):
        process = f"process {os.getpid()} on {socket.gethostname()}"
        problem = f"{this_rank} does not get on ({process}, in {tracker})" + (
            "; the others wait for it" if peers.furthest_behind else ""
        )
    else:
        event = "waited in vain for its peers" if hang else "lost a peer"
        problem = f"{this_rank} {event} in {collective} ({tracker}): {peers}"
    seconds = rank_group.timeout_seconds
    options = f"launch.timeout_seconds (now {seconds:g}) and launch.hang_seconds"
    advice = f" Raise {options} if an update can take that long." if hang else ""
    if hang and stack_directory is not None:
        advice += f" What each rank was doing is in {stack_directory}."
    return (HangDetected if hang else PeerLost)(
        f"{problem}\n{reason}\nThe newest checkpoint is kept: start the same command again.{advice}"
    )


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
