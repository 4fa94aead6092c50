"""Write docs/reference/options.md from the run document's model: `python tools/options_reference.py`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from podscale.config import RunConfig
from podscale.config.option_names import section_of

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "options.md"

HEAD = """# Options of a run document

Generated from `podscale/config` by `tools/options_reference.py`; a test keeps it true. `podscale config RUN`
prints a document with all of them resolved.

The class says what an option may change: `result` options change the numbers, so a run directory and a checkpoint
belong to one set of them; `placement` options say where and on how many processes a run is carried out, so a run may
be continued with others; `display` options change only what is shown.
"""


def render() -> str:
    """Return the page."""
    sections = [_section(name, info) for name, info in RunConfig.model_fields.items()]
    return "\n".join([HEAD, *sections])


def _section(name: str, info: FieldInfo) -> str:
    model = info.annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    tables = [f"## {name}\n", *_table(name, model)]
    for field_name, field_info in model.model_fields.items():
        if (entry := _entry(field_info)) is not None:
            tables += [f"Each entry of `{name}.{field_name}`:\n", *_table(f"{name}.{field_name}[]", entry)]
    return "\n".join(tables)


def _table(prefix: str, model: type[BaseModel]) -> list[str]:
    rows = [f"| `{option}` | {kind} | {default} | {text} |" for option, kind, default, text in _rows(prefix, model)]
    return ["| option | class | default | meaning |", "|---|---|---|---|", *rows, ""]


def _entry(info: FieldInfo) -> type[BaseModel] | None:
    """Return the section type of a list of sections."""
    return section_of(info.annotation) if get_origin(info.annotation) is tuple else None


def _rows(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _rows(f"{prefix}.{name}", info.annotation)
            continue
        extra: Any = info.json_schema_extra
        choices = [argument for argument in get_args(info.annotation) if isinstance(argument, str)]
        listed = f" ({', '.join(f'`{choice}`' for choice in choices)})" if choices else ""
        text = f"{info.description}{listed}".replace("|", "\\|")
        default = "required" if info.is_required() else f"`{json.dumps(info.default)}`"
        yield f"{prefix}.{name}", extra["x-class"], default, text


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
