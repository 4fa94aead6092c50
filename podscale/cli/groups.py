"""Options that go together: a command takes one dataclass, and the command line takes each of its fields."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar

Result = TypeVar("Result")


def expand_option_groups(command: Callable[..., Result]) -> Callable[..., Result]:
    """Puts the fields of each parameter that is a dataclass in its place, so that typer sees options.

    A field is annotated as a parameter of a command would be: Annotated[type, typer.Option(...)], with a default.
    """
    signature = inspect.signature(command)
    groups: dict[str, Any] = {
        name: one.annotation for name, one in signature.parameters.items() if is_dataclass(one.annotation)
    }

    @wraps(command)
    def with_fields(**given: Any) -> Result:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**given, **made)

    seen = [one for parameter in signature.parameters.values() for one in _expand_parameter(parameter)]
    with_fields.__signature__ = signature.replace(parameters=seen)  # type: ignore[attr-defined]
    with_fields.__annotations__ = {one.name: one.annotation for one in seen}
    return with_fields


def _expand_parameter(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    if is_dataclass(parameter.annotation):
        for field in fields(parameter.annotation):
            yield parameter.replace(
                name=field.name, kind=parameter.KEYWORD_ONLY, default=_field_default(field), annotation=field.type
            )
    else:
        yield parameter.replace(kind=parameter.KEYWORD_ONLY)


def _field_default(field: "Field[Any]") -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
