"""What a failed collective says about the other ranks, for people: which collective, and which rank is missing."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from podscale.engine.meeting import RankGroup
from podscale.engine.notes import PeerStatus, ProgressTracker, progress_order
from podscale.engine.pulse import RankHeartbeat
from podscale.engine.stacks import FlightRecorder, dump_stacks
from podscale.engine.waits import current_wait, wait_of
from podscale.errors import HangDetected, PeerLost, PodscaleError, Preempted
from podscale.telemetry.hang import HangLimit

ErrorClassifier = Callable[[BaseException], type[PodscaleError] | None]

COLLECTIVE_GRACE_SECONDS = 5.0
"""Collectives that raise know more than a clock: where both would come at one time, the clock waits for longer."""


@contextmanager
def watch_peers(
    meeting: RankGroup,
    end: Callable[[PodscaleError], None],
    *,
    kind_of: ErrorClassifier,
    deaf: bool,
    seconds: float | None = None,
    hang_seconds: float | None = None,
    stacks: Path | None = None,
    recorder: FlightRecorder | None = None,
) -> Iterator[ProgressTracker]:
    """Lets the other ranks know where this one is; an error because of another rank comes out naming the culprit.

    end: ends this process, called on another thread where the main thread hangs. kind_of: HangDetected or PeerLost
    where a collective raised the error because of another rank, else None. deaf: collectives wait on the device and
    raise nothing. seconds: between two signs of life. hang_seconds: the least time without an update that is called a
    hang; default: none is. stacks: where every rank then writes what it was doing; recorder: with its collectives.
    """
    deaf_seconds = meeting.timeout_seconds if deaf else None
    most = meeting.timeout_seconds + (0.0 if deaf else COLLECTIVE_GRACE_SECONDS)
    whereabouts = ProgressTracker(None if hang_seconds is None else HangLimit(hang_seconds, most))
    speaking = threading.Lock()

    def trouble(reason: str, *, hang: bool) -> None:
        with speaking:
            if hang:
                call_hang(reason)
            kind = HangDetected if hang else PeerLost
            error = told(kind, current_wait() or f"phase {whereabouts.phase}", reason)
            pulse.last_words(str(error), follows=True)
            end(error)

    def call_hang(reason: str, failure: BaseException | None = None) -> None:
        pulse.call_hang()
        if stacks is not None:
            dump_stacks(stacks, meeting.rank, f"{reason}, in {whereabouts}", failure, recorder)

    def told(kind: type[PodscaleError], collective: str, reason: str) -> PodscaleError:
        return _peer_error(kind, collective, reason, meeting, whereabouts, pulse.census(), stacks)

    pulse = RankHeartbeat(meeting, whereabouts, seconds=seconds, deaf_seconds=deaf_seconds, on_trouble=trouble)
    try:
        yield whereabouts
    except Preempted:
        pulse.last_words("")
        raise
    except BaseException as failure:
        with speaking:
            pass  # another thread is about to end this process with more to say
        kind = kind_of(failure)
        if kind is HangDetected or (kind is PeerLost and pulse.hang_called()):
            kind = HangDetected
            call_hang(_last_line(failure), failure)
        explained = told(kind, wait_of(failure) or "a collective", _last_line(failure)) if kind is not None else None
        follows = explained is not None or isinstance(
            failure, HangDetected | PeerLost
        )  # said in full where it was seen
        pulse.last_words(str(failure) or type(failure).__name__, follows=follows)
        if explained is not None:
            raise explained from failure
        raise
    pulse.last_words("")


def _peer_error(
    kind: type[PodscaleError],
    collective: str,
    reason: str,
    meeting: RankGroup,
    at: ProgressTracker,
    census: PeerStatus,
    stacks: Path | None,
) -> PodscaleError:
    """kind: as the backend has it, which cannot tell a peer that is stopped from one that left because of another."""
    hang = kind is HangDetected if census.hang is None else census.hang
    me = f"rank {meeting.rank} of {meeting.size}"
    if hang and not census.missing and (census.behind is None or progress_order(at) < progress_order(census.behind[1])):
        where = f"process {os.getpid()} on {socket.gethostname()}"
        what = f"{me} does not get on ({where}, in {at})" + ("; the others wait for it" if census.behind else "")
    else:
        what = f"{me} {'waited in vain for its peers' if hang else 'lost a peer'} in {collective} ({at}): {census}"
    seconds = meeting.timeout_seconds
    options = f"launch.timeout_seconds (now {seconds:g}) and launch.hang_seconds"
    advice = f" Raise {options} if an update can take that long." if hang else ""
    if hang and stacks is not None:
        advice += f" What each rank was doing is in {stacks}."
    return (HangDetected if hang else PeerLost)(
        f"{what}\n{reason}\nThe newest checkpoint is kept: start the same command again.{advice}"
    )


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
