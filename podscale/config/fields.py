"""The three classes of field in a run document.

`result` fields change the numbers a run produces; `placement` fields say where and on how many it runs; `display`
fields change what is shown. Identity and stale-run checks look at `result` alone, so that a run may resume elsewhere.
"""

from enum import StrEnum
from typing import Any

from pydantic import Field


class FieldClass(StrEnum):
    RESULT = "result"
    PLACEMENT = "placement"
    DISPLAY = "display"


def _field(field_class: FieldClass, default: Any, description: str, constraints: dict[str, Any]) -> Any:
    return Field(default, description=description, json_schema_extra={"x-class": field_class.value}, **constraints)


def result_field(default: Any, description: str, **constraints: Any) -> Any:
    """A field that changes the numbers."""
    return _field(FieldClass.RESULT, default, description, constraints)


def placement_field(default: Any, description: str, **constraints: Any) -> Any:
    """A field that says where, with what and on how many processes the run is carried out."""
    return _field(FieldClass.PLACEMENT, default, description, constraints)


def display_field(default: Any, description: str, **constraints: Any) -> Any:
    """A field that changes only what is shown or exported."""
    return _field(FieldClass.DISPLAY, default, description, constraints)
