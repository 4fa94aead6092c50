"""Dotted names of a document's options, and the likeliest one for an unknown key."""

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section inside a field's type; None if the field is a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((section for section in map(section_of, get_args(annotation)) if section is not None), None)


def option_names_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted option of a kind of document."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from option_names_of(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


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
