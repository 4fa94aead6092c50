"""Errors for users, and the exit codes that launchers act on.

Every error a user can cause is a `PodscaleError`. The command line prints its text without a traceback and exits with
its code. Any other exception is a bug and keeps its traceback.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final


class ExitCode(IntEnum):
    """Exit code of a stage, the same in every launcher."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    PREEMPTED = 75
    """Stopped on request after a checkpoint was saved: start the same command again."""
    HANG = 76
    PEER_LOST = 77


class _Absent:
    """Default of `got`, because None is a value that a user can give."""

    def __repr__(self) -> str:
        return "ABSENT"

    def __reduce__(self) -> str:
        return "ABSENT"  # pickled by name, so that it stays one object


ABSENT: Final = _Absent()


class PodscaleError(Exception):
    """Failure that a user can act on, with the text `location: field: problem (got X). What to do.`

    Args:
        problem: what is wrong and why, one clause without a period.
        field: document key, option, variable, file or URL that the error is about; "" if there is none.
        got: offending value; left out of the text if absent.
        hint: what to do next, a sentence; it has no period if it ends with a command or a path.
        location: file and line of the field, such as `run.yaml:3`; "" if it is not from a document.
    """

    exit_code = ExitCode.FAILED

    def __init__(
        self, problem: str = "", *, field: str = "", got: Any = ABSENT, hint: str = "", location: str = ""
    ) -> None:
        super().__init__(format_error(problem, field=field, got=got, hint=hint, location=location))
        self.problem, self.field, self.got, self.hint, self.location = problem, field, got, hint, location


LONGEST_VALUE = 120
"""Characters of a value in an error's text; the rest is cut off."""


def format_error(problem: str, *, field: str = "", got: Any = ABSENT, hint: str = "", location: str = "") -> str:
    """Return the text of an error; `got` as Python writes it."""
    text = ": ".join(filter(None, (location, field, problem.removesuffix(".") if hint else problem)))
    if got is not ABSENT:
        value = repr(got)
        text += f" (got {value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 3] + '...'})"
    end = "\n" if "\n" in text else " " if text.endswith(".") else ". "  # a list ends with its last line
    return f"{text}{end}{hint}" if hint else text


def fields_of(error: PodscaleError) -> dict[str, Any]:
    """Return the arguments that make an equal error, as JSON holds them, for another process to raise it."""
    fields: dict[str, Any] = {
        "problem": error.problem,
        "field": error.field,
        "hint": error.hint,
        "location": error.location,
    }
    if isinstance(error.got, str | int | float | None):  # a bool is an int
        fields["got"] = error.got
    elif error.got is not ABSENT:
        fields["got"] = repr(error.got)
    return fields


class InputError(PodscaleError, ValueError):
    """The run document, the data or the machine is not usable; nothing was started."""

    exit_code = ExitCode.BAD_INPUT


class InputErrors(InputError):
    """Several problems that were found at once; `errors` has each.

    Args:
        errors: the problems, two or more; the field is that of the first.
        title: line above them; then they are a list.
    """

    def __init__(self, errors: Sequence[InputError], title: str = "") -> None:
        lines = [title, *(f"  - {error}" for error in errors)] if title else map(str, errors)
        super().__init__("\n".join(lines))
        self.errors, self.title = tuple(errors), title
        self.field, self.got = errors[0].field, errors[0].got

    def __reduce__(self) -> Any:
        return InputErrors, (self.errors, self.title)


class Preempted(PodscaleError):
    """A stop was requested and the state was saved; the same command resumes."""

    exit_code = ExitCode.PREEMPTED


class HangDetected(PodscaleError):
    """No progress within the expected time."""

    exit_code = ExitCode.HANG


class PeerLost(PodscaleError):
    """Another rank of the run exited or cannot be reached."""

    exit_code = ExitCode.PEER_LOST


def error_from_exit_code(code: int, message: str) -> PodscaleError:
    """Return the exception of an exit code, so that a stage fails here as it failed there."""
    kinds = (InputError, Preempted, HangDetected, PeerLost)
    kind = next((kind for kind in kinds if kind.exit_code == code), PodscaleError)
    return kind(message)
