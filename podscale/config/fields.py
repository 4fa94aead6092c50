"""Base of all sections of a document: classes of fields, options that take a name, dotted names, and errors.

`result` fields change the numbers of a run, `placement` fields its machines and processes, `display` fields only the
output. Identity checks compare `result` fields alone, so that a run may resume elsewhere.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, TypeGuard, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from podscale.errors import ABSENT, InputError, format_error
from podscale.util.formatting import suggest_similar
from podscale.util.plugins import CALLABLE_PATTERN, NAME_PATTERN, is_from_elsewhere


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
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


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


PLUGINS = f"^{NAME_PATTERN}$"
"""Regular expression of an option that takes plug-ins."""
PLUGINS_AND_CALLABLES = f"^({NAME_PATTERN}|{CALLABLE_PATTERN})$"
"""Regular expression of an option that takes plug-ins and callables of the user's code."""


def choice_schema(names: Sequence[str], pattern: str = PLUGINS_AND_CALLABLES) -> dict[str, object]:
    """Return the JSON schema of an option that takes one of several names, or a name from elsewhere."""
    return {"anyOf": [{"enum": list(names)}, {"pattern": pattern}], "type": "string"}


def check_choice(key: str, value: str, names: Sequence[str], pattern: str = PLUGINS_AND_CALLABLES) -> None:
    """Raise a conflict error if a value is neither one of the names nor a well-formed name from elsewhere."""
    if value in names or re.fullmatch(pattern, value):
        return
    forms = "plugin:NAME" if pattern == PLUGINS else "plugin:NAME, or python:MODULE:CALLABLE"
    hint = suggest_similar(value, names) or f"Choose one of {', '.join(names)}, {forms}."
    raise conflict_error(key, "unknown", got=value, hint=hint)


def check_plugin_options(value: str, options: object) -> None:
    """Raise a conflict error if options of a plug-in are set without one."""
    if options and not is_from_elsewhere(value):
        raise conflict_error(
            "options", f"only for a plug-in or your own code, not for {value}", got=options, hint="Leave it out."
        )


def is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    """Return True if a field's type is a section."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section inside a field's type; None if the field is a value."""
    if is_section(annotation):
        return annotation
    return next((section for section in map(section_of, get_args(annotation)) if section is not None), None)


def option_names_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted option of a kind of document."""
    for name, info in model.model_fields.items():
        if is_section(info.annotation):
            yield from option_names_of(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def changed_options(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the default of each option that is not at its default."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from changed_options(value, f"{prefix}{name}.")
        elif value != info.default:
            yield f"{prefix}{name}", info.default


def is_section_name(name: str, model: type[BaseModel]) -> bool:
    """Return True for the dotted name of a section of options."""
    return any(option.startswith(f"{name}.") for option in option_names_of(model))


def suggest_key(key: str, model: type[BaseModel]) -> str:
    """Return the hint for an unknown key: a similar key, one of that name elsewhere, or the valid keys."""
    parent, _, last = key.rpartition(".")
    names = _keys_of(parent, model)
    similar = [f"{parent}.{name}" if parent else name for name in difflib.get_close_matches(last, names, 1, 0.5)]
    elsewhere = (name for name in option_names_of(model) if name.rpartition(".")[2] == last)
    if suggestion := next(iter([*similar, *elsewhere]), None):
        return f"Did you mean {suggestion}?"
    return f"Valid here: {', '.join(names)}" if names else ""


def _keys_of(section: str, model: type[BaseModel]) -> list[str]:
    """Return the keys of a dotted section; empty if there is none."""
    for part in filter(None, section.split(".")):
        if not part.isdigit():
            inner = section_of(model.model_fields[part].annotation) if part in model.model_fields else None
            if inner is None:
                return []
            model = inner
    return list(model.model_fields)
