"""Base of all sections of a run document: field classes, the Section model, and errors between options.

`result` fields change the numbers of a run, `placement` fields its machines and processes, `display` fields only the
output. Identity checks compare `result` fields alone, so that a run may resume elsewhere.
"""

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from podscale.errors import ABSENT, InputError, format_error


class FieldClass(StrEnum):
    RESULT = "result"
    PLACEMENT = "placement"
    DISPLAY = "display"


def _field(field_class: FieldClass, default: Any, description: str, constraints: dict[str, Any]) -> Any:
    return Field(default, description=description, json_schema_extra={"x-class": field_class.value}, **constraints)


def result_field(default: Any, description: str, **constraints: Any) -> Any:
    """Declare a field that changes the numbers of a run."""
    return _field(FieldClass.RESULT, default, description, constraints)


def placement_field(default: Any, description: str, **constraints: Any) -> Any:
    """Declare a field that sets the machines, software or number of processes of a run."""
    return _field(FieldClass.PLACEMENT, default, description, constraints)


def display_field(default: Any, description: str, **constraints: Any) -> Any:
    """Declare a field that changes only the output."""
    return _field(FieldClass.DISPLAY, default, description, constraints)


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=False
    )


def conflict_error(key: str, problem: str, *, got: Any = ABSENT, hint: str = "") -> PydanticCustomError:
    """Return the error of a check; `key` is the option to change, relative to the section of the validator."""
    message = format_error(problem, field=key, got=got, hint=hint)
    return PydanticCustomError(
        "conflict", "{message}", {"key": key, "message": message, "problem": problem, "got": got, "hint": hint}
    )


def input_error(context: Any) -> InputError:
    """Return the user's error from the context of a `conflict_error`."""
    return InputError(context["problem"], field=context["key"], got=context["got"], hint=context["hint"])


def first_error(error: ValidationError) -> InputError:
    """Return the user's error for the first problem of a section that was not read from a document."""
    first: Any = error.errors()[0]
    if first["type"] == "conflict":
        return input_error(first["ctx"])
    return InputError(first["msg"], field=".".join(map(str, first["loc"])), got=first["input"])
