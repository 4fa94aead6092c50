"""What a failed collective says about the other ranks, for people: which collective, and which rank is missing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch import distributed as dist

from podscale.errors import HangDetected, PeerLost, PodscaleError, Preempted
from podscale.pytorch.meeting import Meeting
from podscale.pytorch.notes import Census, Whereabouts
from podscale.pytorch.pulse import Pulse

WAITS = {
    "allreduce": "the average of a gradient bucket",
    "reducer": "the average of a gradient bucket",
    "batchnorm": "the statistics of batch norm",
    "control": "the control word",
    "checkpoints": "the hand-over of the state",
    "evaluate": "an evaluation",
    "optim": "the optimizer",
    "world": "a barrier",
}
"""What the modules and rooms of this engine wait for, by their names."""

_TIMED_OUT = ("timed out", "timeout")
_LOST = ("connection closed", "connection reset", "connection refused", "broken pipe", "peer", "socket", "nccl error")


@contextmanager
def watched(
    meeting: Meeting, end: Callable[[PodscaleError], None], *, seconds: float | None = None, deaf: bool | None = None
) -> Iterator[Whereabouts]:
    """Lets the other ranks know where this one is; an error because of another rank comes out naming the culprit.

    end: ends this process, called on another thread where a `deaf` main thread would wait for ever. deaf: collectives
    wait on the device and raise nothing (default: there is a GPU). seconds: between two signs of life.
    """
    whereabouts = Whereabouts()

    def trouble(reason: str, *, hang: bool) -> None:
        error = told(HangDetected if hang else PeerLost, f"phase {whereabouts.phase}", reason)
        pulse.last_words(str(error), follows=True)
        end(error)

    def told(kind: type[PodscaleError], collective: str, reason: str) -> PodscaleError:
        return _told(kind, collective, reason, meeting, whereabouts, pulse.census())

    deaf = torch.cuda.is_available() if deaf is None else deaf
    deaf_seconds = meeting.timeout_seconds if deaf else None
    pulse = Pulse(meeting, whereabouts, seconds=seconds, deaf_seconds=deaf_seconds, on_trouble=trouble)
    try:
        yield whereabouts
    except Preempted:
        pulse.last_words("")
        raise
    except BaseException as failure:
        kind = kind_of(failure)
        explained = told(kind, collective_of(failure), _last_line(failure)) if kind is not None else None
        pulse.last_words(str(failure) or type(failure).__name__, follows=explained is not None)
        if explained is not None:
            raise explained from failure
        raise
    pulse.last_words("")


def _told(
    kind: type[PodscaleError], collective: str, reason: str, meeting: Meeting, at: Whereabouts, census: Census
) -> PodscaleError:
    """kind: as the backend has it, which cannot tell a peer that is stopped from one that left because of another."""
    hang = kind is HangDetected if census.hang is None else census.hang
    what = "waited in vain for its peers" if hang else "lost a peer"
    seconds = meeting.timeout_seconds
    advice = f" Raise launch.timeout_seconds (now {seconds:g}) if a step can take that long." if hang else ""
    return (HangDetected if hang else PeerLost)(
        f"rank {meeting.rank} of {meeting.size} {what} in {collective} ({at}): {census}\n{reason}\n"
        f"The newest checkpoint is kept: start the same command again.{advice}"
    )


def kind_of(error: BaseException) -> type[PodscaleError] | None:
    """HangDetected or PeerLost where a collective raised `error` because of another rank, else None."""
    text = str(error).lower()
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError | PodscaleError):
        return None
    if not (isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text):
        return None
    if any(words in text for words in _TIMED_OUT):
        return HangDetected
    return PeerLost if any(words in text for words in _LOST) else None


def collective_of(error: BaseException) -> str:
    """What the collective was for that raised `error`: the error's own note, else by the module that called it."""
    if notes := getattr(error, "__notes__", []):
        return str(notes[0])
    for name in _modules_inside_out(error.__traceback__):
        if name in WAITS:
            return WAITS[name]
    return "a collective"


def _modules_inside_out(traceback: TracebackType | None) -> list[str]:
    """The modules and rooms of this engine that stand in a traceback, the innermost first."""
    room, names = Path(__file__).parent, []
    while traceback is not None:
        path = Path(traceback.tb_frame.f_code.co_filename)
        if path.is_relative_to(room):
            names.append(path.relative_to(room).with_suffix("").parts[0])
        traceback = traceback.tb_next
    return names[::-1]


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
