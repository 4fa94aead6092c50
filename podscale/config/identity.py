"""Identity of a run: the values of the `result` fields of its document."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from podscale.config.data import DataSection
from podscale.config.fields import FieldClass, is_section
from podscale.config.run import RunDocument
from podscale.config.run_config import RunConfig

FIRST_DATA_OPTIONS = frozenset(
    {
        "source",
        "format",
        "classes",
        "validation_fraction",
        "stratify",
        "seed",
        "shard_bytes",
        "min_shards",
        "policy",
        "max_reject_rate",
        "dedup",
        "resize_short",
        "quality",
        "max_pixels",
        "max_bytes",
    }
)
"""Options of the data section in the first version, which are part of the name of every shard set."""


@dataclass(frozen=True)
class Difference:
    """One option whose value differs between two documents."""

    option: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.option}: was {self.before!r}, is {self.now!r}"


def field_values(model: BaseModel, field_class: FieldClass, *, entry_defaults: bool = True) -> dict[str, Any]:
    """Return the options of one class as {dotted name: JSON value}.

    A list of sections is one value. Options of its entries that have another class are values of that class, with the
    number of the entry in their names.

    Args:
        entry_defaults: include options at their defaults in the entries of lists of sections.
    """
    return dict(_iter_field_values(model, model.model_dump(mode="json"), field_class, "", entry_defaults))


def _iter_field_values(
    model: BaseModel, dumped: dict[str, Any], field_class: FieldClass, prefix: str, entry_defaults: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the options of a section, of which `dumped` is the JSON."""
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        entries = value if isinstance(value, tuple) and all(isinstance(entry, BaseModel) for entry in value) else ()
        if isinstance(value, BaseModel):
            yield from _iter_field_values(value, dumped[name], field_class, f"{prefix}{name}.", entry_defaults)
        elif _class_of(info) != field_class:
            for number, entry in enumerate(entries):
                inside = f"{prefix}{name}.{number}."
                yield from _iter_field_values(entry, dumped[name][number], field_class, inside, entry_defaults)
        elif entries:
            yield f"{prefix}{name}", [_dump_entry(entry, field_class, entry_defaults) for entry in entries]
        else:
            yield f"{prefix}{name}", dumped[name]


def _class_of(info: FieldInfo) -> str | None:
    extra = info.json_schema_extra
    return str(extra["x-class"]) if isinstance(extra, dict) and "x-class" in extra else None


def _dump_entry(entry: BaseModel, field_class: FieldClass, defaults: bool = True) -> dict[str, Any]:
    """Return an entry of a list of sections as JSON, without options of other classes than the list's."""
    dumped, fields = entry.model_dump(mode="json", exclude_defaults=not defaults), type(entry).model_fields
    return {name: value for name, value in dumped.items() if _class_of(fields[name]) in (None, field_class)}


def _iter_section_lists(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the dotted name of each list of sections, and the type of its entries."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if is_section(kind):
            yield from _iter_section_lists(kind, f"{prefix}{name}.")
        elif get_origin(kind) is tuple and is_section(entry := get_args(kind)[0]):
            yield f"{prefix}{name}", entry


def result_values(config: RunConfig) -> dict[str, Any]:
    return field_values(config, FieldClass.RESULT)


def fingerprint(values: dict[str, Any]) -> str:
    """Return a stable hash of JSON values: 16 hexadecimal digits."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed_result_values(config: BaseModel) -> dict[str, Any]:
    """Return the result values that differ from their defaults; an option that is new in a version changes nothing."""
    defaults = _default_result_values(type(config))
    values = field_values(config, FieldClass.RESULT, entry_defaults=False)
    return {name: value for name, value in values.items() if value != defaults[name]}


@cache
def _default_result_values(kind: type[BaseModel]) -> dict[str, Any]:
    return field_values(kind(), FieldClass.RESULT, entry_defaults=False)


def data_fingerprint(data: DataSection) -> str:
    """Return the name of a data section's shard set in <workspace>/datasets/.

    An option that came later is part of the name if it is changed, so that older shard sets keep their names.
    """
    values, changed = field_values(data, FieldClass.RESULT), changed_result_values(data)
    return fingerprint({name: value for name, value in values.items() if name in FIRST_DATA_OPTIONS or name in changed})


def add_later_options(
    values: dict[str, Any], names: Iterable[str], field_class: FieldClass = FieldClass.RESULT
) -> dict[str, Any]:
    """Return the values of an older version's run with the options that came later, at their defaults.

    A new option's default is what the older versions did.

    Args:
        values: options of one class.
        names: options of that class in the present version.
    """
    defaults = field_values(RunDocument(), field_class)
    filled = {name: defaults[name] for name in names if name in defaults} | values
    for name, section in _iter_section_lists(RunDocument):
        if name in filled:
            with suppress(ValidationError):  # an entry that is invalid now is a difference, which the caller names
                entries = [section.model_validate(entry) for entry in filled[name]]
                filled[name] = [_dump_entry(entry, field_class) for entry in entries]
    return filled


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    """Return the differences between two sets of result values, in option order."""
    names = [*before, *(name for name in now if name not in before)]
    return [Difference(name, before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)]
