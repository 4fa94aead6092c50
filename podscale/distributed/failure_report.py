"""What a failed collective says about the other ranks, for people: which collective, and which rank is missing.

What a rank that hangs was doing: the Python stacks of its threads and what its engine's recorder holds.
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
"""Writes what an engine's collectives were at to a file; a line on what became of it."""


def dump_stacks(
    directory: Path,
    rank: int,
    reason: str,
    failure: BaseException | None = None,
    flight_recorder: FlightRecorder | None = None,
) -> None:
    """Adds to <folder>/rank-<k>.txt, and writes the recorder's state to rank-<k>.flight.json. Never raises.

    failure: what the main thread has been brought out of its wait by.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"rank-{rank}.txt").open("a", encoding="utf-8") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            file.write(f"{when} UTC, rank {rank}, process {os.getpid()} on {socket.gethostname()}: {reason}\n")
            file.writelines(traceback.format_exception(failure) if failure is not None else [])
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(
                (flight_recorder(directory / f"rank-{rank}.flight.json") if flight_recorder is not None else "")
                + "\n\n"
            )
    except OSError as error:
        logger.warning("%s: the stacks of this rank are not kept: %s", directory, error.strerror)


ErrorClassifier = Callable[[BaseException], type[PodscaleError] | None]

COLLECTIVE_GRACE_SECONDS = 5.0
"""Collectives that raise know more than a clock: where both would come at one time, the clock waits for longer."""


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
    """Lets the other ranks know where this one is; an error because of another rank comes out naming the culprit.

    exit_process: ends this process, called on another thread where the main thread hangs. classify_error: HangDetected
    or PeerLost where a collective raised the error because of another rank, else None. silent_collectives: collectives
    wait on the device and raise nothing. interval_seconds: between two signs of life. hang_seconds: the least time
    without an update that is called a hang; default: none is. stack_directory: where every rank then writes what it was
    doing; flight_recorder: with its collectives.
    """
    deaf_seconds = rank_group.timeout_seconds if silent_collectives else None
    most = rank_group.timeout_seconds + (0.0 if silent_collectives else COLLECTIVE_GRACE_SECONDS)
    whereabouts = ProgressTracker(None if hang_seconds is None else HangLimit(hang_seconds, most))
    speaking = threading.Lock()

    def handle_trouble(reason: str, *, hang: bool) -> None:
        with speaking:
            if hang:
                report_hang(reason)
            kind = HangDetected if hang else PeerLost
            error = explain(kind, current_wait() or f"phase {whereabouts.phase}", reason)
            pulse.stop(str(error), caused_by_peer=True)
            exit_process(error)

    def report_hang(reason: str, failure: BaseException | None = None) -> None:
        pulse.report_hang()
        if stack_directory is not None:
            dump_stacks(stack_directory, rank_group.rank, f"{reason}, in {whereabouts}", failure, flight_recorder)

    def explain(kind: type[PodscaleError], collective: str, reason: str) -> PodscaleError:
        return _peer_error(kind, collective, reason, rank_group, whereabouts, pulse.peers(), stack_directory)

    pulse = RankHeartbeat(
        rank_group,
        whereabouts,
        interval_seconds=interval_seconds,
        stall_seconds=deaf_seconds,
        on_trouble=handle_trouble,
    )
    try:
        yield whereabouts
    except Preempted:
        pulse.stop("")
        raise
    except BaseException as failure:
        with speaking:
            pass  # another thread is about to end this process with more to say
        kind = classify_error(failure)
        if kind is HangDetected or (kind is PeerLost and pulse.hang_reported()):
            kind = HangDetected
            report_hang(_last_line(failure), failure)
        explained = explain(kind, wait_of(failure) or "a collective", _last_line(failure)) if kind is not None else None
        follows = explained is not None or isinstance(
            failure, HangDetected | PeerLost
        )  # said in full where it was seen
        pulse.stop(str(failure) or type(failure).__name__, caused_by_peer=follows)
        if explained is not None:
            raise explained from failure
        raise
    pulse.stop("")


def _peer_error(
    kind: type[PodscaleError],
    collective: str,
    reason: str,
    rank_group: RankGroup,
    tracker: ProgressTracker,
    peers: PeerStatus,
    stack_directory: Path | None,
) -> PodscaleError:
    """kind: as the backend has it, which cannot tell a peer that is stopped from one that left because of another."""
    hang = kind is HangDetected if peers.is_hang is None else peers.is_hang
    me = f"rank {rank_group.rank} of {rank_group.size}"
    if (
        hang
        and not peers.missing
        and (peers.furthest_behind is None or progress_order(tracker) < progress_order(peers.furthest_behind[1]))
    ):
        where = f"process {os.getpid()} on {socket.gethostname()}"
        what = f"{me} does not get on ({where}, in {tracker})" + (
            "; the others wait for it" if peers.furthest_behind else ""
        )
    else:
        what = f"{me} {'waited in vain for its peers' if hang else 'lost a peer'} in {collective} ({tracker}): {peers}"
    seconds = rank_group.timeout_seconds
    options = f"launch.timeout_seconds (now {seconds:g}) and launch.hang_seconds"
    advice = f" Raise {options} if an update can take that long." if hang else ""
    if hang and stack_directory is not None:
        advice += f" What each rank was doing is in {stack_directory}."
    return (HangDetected if hang else PeerLost)(
        f"{what}\n{reason}\nThe newest checkpoint is kept: start the same command again.{advice}"
    )


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
