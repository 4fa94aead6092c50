"""Errors of checks between options, which a document's reader tells with the line that they were written on."""

from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from podscale.errors import ABSENT, InputError, format_error


def conflict_error(key: str, problem: str, *, got: Any = ABSENT, hint: str = "") -> PydanticCustomError:
    """Return the error of a check.

    Args:
        key: dotted option to change first; in a section's own check, as it is called within the section.
        problem: what does not go together.
        got: value of that option, if the problem does not tell it.
        hint: what to do, a sentence.
    """
    message = format_error(problem, field=key, got=got, hint=hint)
    return PydanticCustomError(
        "conflict", "{message}", {"key": key, "message": message, "problem": problem, "got": got, "hint": hint}
    )


def refusal(error: PydanticCustomError) -> InputError:
    """Return a conflict as the error that a user gets, for checks that are made after the document was read."""
    context: Any = error.context
    return InputError(context["problem"], field=context["key"], got=context["got"], hint=context["hint"])


def first_error(error: ValidationError) -> InputError:
    """Return the first problem of a section that was made by a program."""
    first: Any = error.errors()[0]
    if first["type"] == "conflict":
        context = first["ctx"]
        return InputError(context["problem"], field=context["key"], got=context["got"], hint=context["hint"])
    return InputError(first["msg"], field=".".join(map(str, first["loc"])), got=first["input"])
