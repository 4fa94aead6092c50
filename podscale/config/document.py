"""Reader of run documents: YAML and `--set` overrides to a `RunConfig`, with errors that name key, file and line."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from podscale.config.fields import is_section_name, option_names_of, suggest_key
from podscale.config.optimizer import OPTIMIZER_NAMES, has_optimizer_option
from podscale.config.outside_code import record_code, record_plugins
from podscale.config.run_config import RunConfig
from podscale.config.yaml_reader import KeyLocations, NotYaml, dump_yaml, parse_yaml
from podscale.errors import ABSENT, InputError, combine_errors
from podscale.util.plugins import is_from_elsewhere

DocumentT = TypeVar("DocumentT", bound=BaseModel)

Overrides = Sequence[str] | Mapping[str, Any]
"""Changes of a document: texts of the form `a.b=c`, or values by section or dotted option."""

MAX_DOCUMENT_BYTES = 2**20
PROBLEMS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "not an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "not a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "not true or false"),
    "string_type": "not text",
    "tuple_type": "not a list",
    "dict_type": "not a mapping",
    "model_type": "not a section of options",
    "missing": "missing",
}
"""Problems by pydantic's error type; other types have pydantic's own message."""


@dataclass(frozen=True)
class Defaults:
    """Defaults of a run document, such as a cluster's own settings."""

    text: str
    name: str


@dataclass
class _Origins:
    """Origins of a document's values, for messages; `overrides` has the text of each override by its key."""

    document: KeyLocations
    defaults: KeyLocations | None = None
    overrides: dict[str, str] = field(default_factory=dict)

    def locate(self, key: str) -> str:
        """Return the override of a key, else the line of it or its nearest parent, else the file."""
        inside = next((text for name, text in self.overrides.items() if name.startswith(f"{key}.")), None)
        if inside is not None and key not in self.document.lines:
            return inside
        while key:
            if key in self.overrides:
                return self.overrides[key]
            for source in filter(None, (self.document, self.defaults)):
                if key in source.lines:
                    return source.at(source.lines[key])
            key = key.rpartition(".")[0]
        return self.document.name


def load(path: Path | str | None, overrides: Overrides = (), defaults: Defaults | None = None) -> RunConfig:
    """Load the run document at `path` (None: only built-in values) over `defaults`, with overrides.

    Raises InputError if the file cannot be read, is no YAML, repeats a key, or has an unknown key or a wrong value.
    """
    if path is None:
        return loads("{}", "defaults", overrides, defaults)
    return loads(read_text(Path(path)), str(path), overrides, defaults)


def read_text(path: Path) -> str:
    """Return the text of a document; raises InputError if it cannot be read."""
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise InputError(f"too large for a run document, more than {MAX_DOCUMENT_BYTES} bytes", field=str(path))
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the run document: {error.strerror or error}", field=str(path)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"the run document is not UTF-8 text: {error}", field=str(path)) from error


def loads(text: str, name: str = "document", overrides: Overrides = (), defaults: Defaults | None = None) -> RunConfig:
    """Load a run document from text; `name` is the name of the file in messages."""
    values, origins = _read_values(text, name, overrides, defaults)
    _drop_unsupported_options(values, origins)
    names_code = "launch.code" in origins.overrides and "run.code" not in origins.overrides
    return record_code(record_plugins(_validate(RunConfig, values, origins)), anew=names_code)


def load_values(values: Mapping[str, Any], name: str) -> RunConfig:
    """Load a run document from JSON values; `name` stands for the file in messages."""
    return record_code(record_plugins(_validate(RunConfig, dict(values), _Origins(KeyLocations(name)))))


def loads_as(model: type[DocumentT], text: str, name: str) -> DocumentT:
    """Load another kind of document, `model`, with the rules and errors of a run document."""
    return _validate(model, *_read_values(text, name))


def peek(source: Path | str | Mapping[str, Any] | None, key: str, overrides: Overrides = ()) -> Any:
    """Return one value as `load` reads it from a file or from values, unchecked; None if it is absent."""
    if isinstance(source, Mapping):
        text = dump_yaml(dict(source))
    else:
        text = "{}" if source is None else read_text(Path(source))
    value: Any = _read_values(text, "" if isinstance(source, Mapping) else str(source), overrides)[0]
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def is_set(source: Path | str | Mapping[str, Any] | None, key: str, overrides: Overrides = ()) -> bool:
    """Return whether a document or its overrides hold a key, if only with the value null."""
    section, _, last = key.rpartition(".")
    values = peek(source, section, overrides)
    return isinstance(values, dict) and last in values


def dumps(config: RunConfig) -> str:
    """Return the resolved document as YAML; `loads(dumps(c)) == c`."""
    return dump_yaml(config.model_dump(mode="json"))


def json_schema() -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


def option_names() -> list[str]:
    """Return every dotted option of a run document, in order."""
    return list(option_names_of(RunConfig))


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of `a.b=c` overrides by dotted name; raises InputError for a malformed one."""
    return {key: value for key, value, _ in map(_parse_override, overrides)}


def format_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as overrides: {"train.optimizer": {"name": "sgd"}} -> ['train.optimizer.name="sgd"']."""
    overrides = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            overrides += format_overrides({f"{name}.{inner}": nested for inner, nested in value.items()})
        else:
            overrides.append(f"{name}={json.dumps(value)}")
    return overrides


def _read_values(
    text: str, name: str, overrides: Overrides = (), defaults: Defaults | None = None
) -> tuple[dict[str, Any], _Origins]:
    """Return the values of a document with its defaults and overrides, unchecked."""
    origins = _Origins(KeyLocations(name))
    values = parse_yaml(text, origins.document)
    if defaults is not None:
        origins.defaults = KeyLocations(defaults.name)
        values = merge_values(parse_yaml(defaults.text, origins.defaults), values)
    settings = _iter_settings(overrides) if isinstance(overrides, Mapping) else map(_parse_override, overrides)
    for key, value, origin in settings:
        _apply_override(values, key, value, origin)
        origins.overrides[key] = origin
    return values, origins


def merge_values(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Merge values over defaults, section by section."""
    merged = dict(defaults)
    for name, value in values.items():
        default = merged.get(name)
        both_sections = isinstance(default, dict) and isinstance(value, dict)
        merged[name] = merge_values(default, value) if both_sections else value  # type: ignore[arg-type]
    return merged


def _apply_override(values: dict[str, Any], key: str, value: Any, origin: str) -> None:
    *parents, last = key.split(".")
    section = values
    for depth, parent in enumerate(parents, start=1):
        child = section.setdefault(parent, {})
        if not isinstance(child, dict):
            path = ".".join(parents[:depth])
            raise InputError("a value, not a section", field=path, got=child, location=origin)
        section = child
    section[last] = value


def _parse_override(override: str) -> tuple[str, Any, str]:
    """Return key, value and origin of `a.b=c`; a value that is no YAML is text."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise InputError("write it as section.key=value", field=f"--set {override}")
    value: Any = text
    if not text.strip():
        value = ""
    else:
        with suppress(NotYaml):
            value = parse_yaml(f"value: {text}", KeyLocations(f"--set {override}"))["value"]
    return key.strip(), value, f"--set {override}"


def _iter_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield option, value and origin of each setting; the options of a section one by one."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and is_section_name(key, RunConfig):
            yield from _iter_settings(value, f"{key}.")
        else:
            yield key, plain_value(value), "argument"


def plain_value(value: Any) -> Any:
    """Return a Python value as YAML reads it: paths as text, tuples as lists, sections as mappings."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): plain_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(entry) for entry in value]
    return fspath(value) if isinstance(value, PathLike) else value


def _drop_unsupported_options(values: dict[str, Any], origins: _Origins) -> None:
    """If `--set` names the optimizer, drop the document's options that this optimizer does not have."""
    if "train.optimizer.name" not in origins.overrides:
        return
    section = values["train"]["optimizer"]
    if section["name"] not in OPTIMIZER_NAMES and not is_from_elsewhere(str(section["name"])):
        return  # the validation refuses it
    for option in [name for name in section if not has_optimizer_option(section["name"], name)]:
        key = f"train.optimizer.{option}"
        if not any(f"{name}.".startswith(f"{key}.") for name in origins.overrides):
            del section[option]


def _validate(model: type[DocumentT], values: dict[str, Any], origins: _Origins) -> DocumentT:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        errors = [_convert_error(item, origins, model) for item in error.errors(include_url=False)]
        raise combine_errors(errors) from None


def _convert_error(item: Any, origins: _Origins, model: type[BaseModel]) -> InputError:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "conflict":
        context = item["ctx"]
        key = f"{key}.{context['key']}" if key else context["key"]
        problem, got, hint = context["problem"], context["got"], context["hint"]
    elif item["type"] == "extra_forbidden":
        problem, got, hint = "unknown key", ABSENT, suggest_key(key, model)
    else:
        message = str(item["msg"]).removeprefix("Value error, ")
        problem, hint = PROBLEMS.get(item["type"], message[:1].lower() + message[1:]), ""
        got = item["input"] if key and item["type"] != "missing" else ABSENT
    return InputError(problem, field=key, got=got, hint=hint, location=origins.locate(key))
