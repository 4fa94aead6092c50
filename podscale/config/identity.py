"""Identity of a run: the values of the `result` fields of its document."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from podscale.config.data import DataSection
from podscale.config.fields import FieldClass
from podscale.config.run import RunDocument
from podscale.config.run_config import RunConfig
from podscale.config.schedule import PhaseSection

PHASES = "train.phases"
"""Result option whose value is a list of sections."""


@dataclass(frozen=True)
class Difference:
    """One option whose value differs between two documents."""

    option: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.option}: was {self.before!r}, is {self.now!r}"


def field_values(model: BaseModel, field_class: FieldClass, prefix: str = "") -> dict[str, Any]:
    """Return the options of one class as {dotted name: JSON value}."""
    return dict(_iter_field_values(model, field_class, prefix))


def _iter_field_values(model: BaseModel, field_class: FieldClass, prefix: str) -> Iterator[tuple[str, Any]]:
    dumped = model.model_dump(mode="json")
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _iter_field_values(value, field_class, f"{prefix}{name}.")
            continue
        if _class_of(info) == field_class:
            yield f"{prefix}{name}", _without_other_classes(value, dumped[name])
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _iter_field_values(item, field_class, f"{prefix}{name}.{number}.")


def _class_of(info: FieldInfo) -> str | None:
    extra = info.json_schema_extra
    return str(extra["x-class"]) if isinstance(extra, dict) and "x-class" in extra else None


def _without_other_classes(value: Any, dumped: Any) -> Any:
    """Return the JSON value of a list of sections without the options that only affect machines or output."""
    if not isinstance(value, tuple) or not all(isinstance(item, BaseModel) for item in value):
        return dumped
    others = (FieldClass.PLACEMENT, FieldClass.DISPLAY)
    return [
        {name: kept for name, kept in entry.items() if _class_of(type(item).model_fields[name]) not in others}
        for item, entry in zip(value, dumped, strict=True)
    ]


def result_values(config: RunConfig) -> dict[str, Any]:
    return field_values(config, FieldClass.RESULT)


def fingerprint(values: dict[str, Any]) -> str:
    """Return a stable hash of JSON values: 16 hexadecimal digits."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed_result_values(config: BaseModel) -> dict[str, Any]:
    """Return the result values that differ from their defaults; an option that is new in a version changes nothing."""
    defaults = field_values(type(config)(), FieldClass.RESULT)
    changed = {
        name: value for name, value in field_values(config, FieldClass.RESULT).items() if value != defaults[name]
    }
    if PHASES in changed:
        sections: Any = config
        for part in PHASES.split("."):
            sections = getattr(sections, part)
        dumped = [section.model_dump(mode="json", exclude_defaults=True) for section in sections]
        changed[PHASES] = _without_other_classes(sections, dumped)
    return changed


def data_fingerprint(data: DataSection) -> str:
    """Return the name of a data section's shard set in <workspace>/datasets/."""
    values = field_values(data, FieldClass.RESULT)
    if data.holdout_fraction is None:
        del values["holdout_fraction"]  # so that shard sets older than the option keep their names
    return fingerprint(values)


def add_later_options(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the result values of an older version's run with the options that came later, at their defaults.

    A new option's default is what the older versions did.

    Args:
        names: options of the present version.
    """
    defaults = field_values(RunDocument(), FieldClass.RESULT)
    filled = {name: defaults[name] for name in names if name in defaults} | values
    try:
        phases = tuple(PhaseSection.model_validate(phase) for phase in filled.get(PHASES, ()))
    except ValidationError:
        return filled  # a difference, which the caller names
    if phases:
        filled[PHASES] = _without_other_classes(phases, [phase.model_dump(mode="json") for phase in phases])
    return filled


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    """Return the differences between two sets of result values, in option order."""
    names = [*before, *(name for name in now if name not in before)]
    return [Difference(name, before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)]
