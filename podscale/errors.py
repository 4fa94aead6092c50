"""Errors for people, and the exit codes that launchers act on.

Every error a user can cause is a `PodscaleError`: its text says what happened, why, and what to do next. The command
line prints that text without a traceback and exits with the error's code. Anything else is a bug and keeps its
traceback.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a stage ended; the meaning is the same in every launcher."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    PREEMPTED = 75
    """Stopped on request after saving a checkpoint: start the same command again."""
    HANG = 76
    PEER_LOST = 77


class PodscaleError(Exception):
    """A failure that a person can act on."""

    exit_code = ExitCode.FAILED


class InputError(PodscaleError, ValueError):
    """The run document, the data or the place to run is not usable; nothing was started."""

    exit_code = ExitCode.BAD_INPUT


class Preempted(PodscaleError):
    """A stop was requested and the state was saved; the same command continues."""

    exit_code = ExitCode.PREEMPTED


class HangDetected(PodscaleError):
    """No progress within the expected time."""

    exit_code = ExitCode.HANG


class PeerLost(PodscaleError):
    """Another rank of the run ended or cannot be reached."""

    exit_code = ExitCode.PEER_LOST


def error_of(code: int, message: str) -> PodscaleError:
    """The exception of an exit code, so that a stage fails here as it failed there."""
    kinds = (InputError, Preempted, HangDetected, PeerLost)
    kind = next((kind for kind in kinds if kind.exit_code == code), PodscaleError)
    return kind(message)
