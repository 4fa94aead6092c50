"""Errors for users, and the exit codes that launchers act on.

The command line prints the text of a `PodscaleError` without a traceback and exits with its code. Any other exception
is a bug and keeps its traceback.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final


class ExitCode(IntEnum):
    """Exit code of a stage."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    PREEMPTED = 75
    """Stopped on request after saving a checkpoint; the same command resumes."""
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
        problem: one clause without a period.
        field: document key, option, variable, file or URL; "" if there is none.
        got: offending value; left out of the text if absent.
        hint: advice, a sentence; without a period if it ends with a command or a path.
        location: file and line of the field, such as `run.yaml:3`; "" if it is not from a document.
    """

    exit_code = ExitCode.FAILED

    def __init__(
        self, problem: str = "", *, field: str = "", got: Any = ABSENT, hint: str = "", location: str = ""
    ) -> None:
        super().__init__(format_error(problem, field=field, got=got, hint=hint, location=location))
        self.problem, self.field, self.got, self.hint, self.location = problem, field, got, hint, location


LONGEST_VALUE = 120
"""Maximal length of a value in an error's text, characters."""


def format_error(problem: str, *, field: str = "", got: Any = ABSENT, hint: str = "", location: str = "") -> str:
    text = ": ".join(filter(None, (location, field, problem.removesuffix(".") if hint else problem)))
    if got is not ABSENT:
        value = repr(got)
        text += f" (got {value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 3] + '...'})"
    end = "\n" if "\n" in text else " " if text.endswith(".") else ". "  # a list ends with its last line
    return f"{text}{end}{hint}" if hint else text


def fields_of(error: PodscaleError) -> dict[str, Any]:
    """Return the arguments of an error as JSON values, so that another process can raise it."""
    if isinstance(error, InputErrors):
        return {"problem": str(error)}  # its field and value are those of the first error
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
    """Run document, data or machine that is not usable; nothing was started."""

    exit_code = ExitCode.BAD_INPUT


class InputErrors(InputError):
    """Several problems found at once; with a `title`, the text is a list below it."""

    def __init__(self, errors: Sequence[InputError], title: str = "") -> None:
        lines = [title, *(f"  - {error}" for error in errors)] if title else map(str, errors)
        super().__init__("\n".join(lines))
        self.errors, self.title = tuple(errors), title
        self.field, self.got = errors[0].field, errors[0].got

    def __reduce__(self) -> Any:
        return InputErrors, (self.errors, self.title)


def combine_errors(errors: Iterable[InputError], problem: str = "") -> InputError:
    """Return the error if there is one, else InputErrors of all that differ; with a `problem`, below it as a title."""
    distinct = list({str(error): error for error in errors}.values())
    if len(distinct) == 1:
        return distinct[0]
    return InputErrors(distinct, f"{problem}; {len(distinct)} things to change:" if problem else "")


class Preempted(PodscaleError):
    """Stop on request, after the state was saved; the same command resumes."""

    exit_code = ExitCode.PREEMPTED


class JobAbandoned(Preempted):
    """Start of a stage whose job has saved and stopped, because its pipeline is gone.

    The command reports the code of a stop but exits with 0, because operators restart the pods of every other code.
    """


class HangDetected(PodscaleError):
    """No progress within the expected time."""

    exit_code = ExitCode.HANG


class PeerLost(PodscaleError):
    """Another rank of the run exited or cannot be reached."""

    exit_code = ExitCode.PEER_LOST


class GpuFailed(PodscaleError):
    """Failure of this rank's GPU, or of a kernel on it. A cluster restarts the job; a launcher of one pod does not."""


def error_from_exit_code(code: int, message: str) -> PodscaleError:
    """Return the exception of another process's exit code."""
    kinds = (InputError, Preempted, HangDetected, PeerLost)
    kind = next((kind for kind in kinds if kind.exit_code == code), PodscaleError)
    return kind(message)
