"""Read a run document: YAML text plus `--set` overrides to a `RunConfig`, with errors that name key, file and line.

YAML is read as data only: no tags, no duplicate keys, no aliases (they can blow up a small file), numbers as in
YAML 1.2 (so that `1e-4` is a number).
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from podscale.config.optimizer import OPTIMIZER_NAMES, optimizers_with
from podscale.config.run_config import RunConfig
from podscale.errors import ABSENT, InputError, InputErrors

DocumentT = TypeVar("DocumentT", bound=BaseModel)

MAX_DOCUMENT_BYTES = 2**20


_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_CORE_SCHEMA = (  # YAML 1.2.2, section 10.3.2; the order decides if two match
    ("null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
)


class _DocumentLoader(yaml.SafeLoader):
    """Safe YAML with the scalars of version 1.2: `no` is a word, 1e-4 a number, 010 is ten, 1:30 and dates are text."""


_DocumentLoader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _CORE_SCHEMA:
    _DocumentLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


_DocumentLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


class _DocumentDumper(yaml.SafeDumper):
    """Quote what any version of YAML would take for something other than text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """YAML 1.1 folds the line breaks of Unicode too, unless they are escaped."""
    folds = any(c in text for c in "\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if folds else None)


_DocumentDumper.add_representer(str, _represent_text)
_DocumentDumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


class NotYaml(InputError):
    """Text that YAML cannot parse."""


@dataclass
class _KeyLocations:
    """Locations of the dotted keys, for messages."""

    name: str
    lines: dict[str, int] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    defaults: "_KeyLocations | None" = None
    """Locations of the defaults."""

    def locate(self, key: str) -> str:
        """Return the location of a key: the override, else the line of the key or its nearest parent, else the file."""
        inside = next((text for name, text in self.overrides.items() if name.startswith(f"{key}.")), None)
        if inside is not None and key not in self.lines:
            return f"--set {inside}"
        probe = key
        while probe:
            if probe in self.overrides:
                return f"--set {self.overrides[probe]}"
            if probe in self.lines:
                return f"{self.name}:{self.lines[probe]}"
            if self.defaults is not None and probe in self.defaults.lines:
                return self.defaults.locate(probe)
            probe = probe.rpartition(".")[0]
        return self.name


@dataclass(frozen=True)
class Defaults:
    """Defaults beneath a run document, such as a cluster's own settings."""

    text: str
    name: str


def load(path: Path | str | None, overrides: Sequence[str] = (), defaults: Defaults | None = None) -> RunConfig:
    """Load the run document at `path` (None: only built-in values) over `defaults`, with `a.b=c` overrides applied.

    Raises InputError: the file cannot be read, is no YAML, repeats a key, has an unknown key or a wrong value.
    """
    if path is None:
        return loads("{}", "defaults", overrides, defaults)
    path = Path(path)
    return loads(read_text(path), str(path), overrides, defaults)


def read_text(path: Path) -> str:
    """Read the text of a document; raises InputError if it cannot be read."""
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise InputError(f"no run document: larger than {MAX_DOCUMENT_BYTES} bytes", field=str(path))
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the run document: {error.strerror or error}", field=str(path)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"the run document is not UTF-8 text: {error}", field=str(path)) from error


def loads(
    text: str, name: str = "document", overrides: Sequence[str] = (), defaults: Defaults | None = None
) -> RunConfig:
    """Load a run document from text; `name` stands in for the file in messages."""
    origins = _KeyLocations(name)
    values = _parse(text, origins)
    if defaults is not None:
        origins.defaults = _KeyLocations(defaults.name)
        values = _merge_values(_parse(defaults.text, origins.defaults), values)
    for override in overrides:
        _apply_override(values, override, origins)
    _drop_unsupported_options(values, origins)
    return _validate(RunConfig, values, origins)


def loads_as(model: type[DocumentT], text: str, name: str) -> DocumentT:
    """Another kind of document, `model`, from text, under the same rules and with the same errors as a run document."""
    origins = _KeyLocations(name)
    return _validate(model, _parse(text, origins), origins)


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of `a.b=c` overrides, by dotted name. Raises InputError for one that is written otherwise."""
    found: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise _malformed(override)
        found[key.strip()] = _parse_override_value(text, override)
    return found


def format_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings as overrides for `load`: {"train.optimizer": {"name": "sgd"}} -> ['train.optimizer.name="sgd"']."""
    found = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found += format_overrides({f"{name}.{inner}": below for inner, below in value.items()})
        else:
            found.append(f"{name}={json.dumps(value)}")
    return found


def _validate(model: type[DocumentT], values: dict[str, Any], origins: _KeyLocations) -> DocumentT:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        errors = [_format_errors(item, origins, model) for item in error.errors(include_url=False)]
        raise (errors[0] if len(errors) == 1 else InputErrors(errors)) from None


def peek(path: Path | str | None, key: str, overrides: Sequence[str] = ()) -> Any:
    """Return one value as `load` would read it, before any check; None if it is not given."""
    origins = _KeyLocations(str(path))
    values = _parse(read_text(Path(path)), origins) if path is not None else {}
    for override in overrides:
        _apply_override(values, override, origins)
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def dumps(config: RunConfig) -> str:
    """The resolved document as YAML; `loads(dumps(c)) == c`."""
    values = config.model_dump(mode="json")
    text: str = yaml.dump(values, Dumper=_DocumentDumper, sort_keys=False, allow_unicode=True)
    return text


def json_schema() -> dict[str, Any]:
    """The JSON schema of a run document."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


def _parse(text: str, origins: _KeyLocations) -> dict[str, Any]:
    loader = None
    try:
        loader = _DocumentLoader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise InputError("a document is a mapping of sections", got=_node_kind(node), place=origins.name)
        _record_lines(node, "", origins)
        values: dict[str, Any] = loader.construct_document(node)
        return values
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{origins.name}:{mark.line + 1}" if mark else origins.name
        problem = getattr(error, "problem", None) or str(error)
        raise NotYaml(f"not valid YAML: {problem}", place=place) from None
    except RecursionError:
        raise NotYaml("not valid YAML: nested too deeply for a run document", place=origins.name) from None
    finally:
        if loader is not None:
            loader.dispose()


def _merge_values(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Merge values over others: sections are joined, everything else is replaced."""
    joined = dict(defaults)
    for name, value in values.items():
        under = joined.get(name)
        joined[name] = _merge_values(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return joined


def _node_kind(node: yaml.Node) -> str:
    return "list" if isinstance(node, yaml.SequenceNode) else "single value"


def _record_lines(node: yaml.Node, prefix: str, origins: _KeyLocations, seen: set[int] | None = None) -> None:
    seen = set() if seen is None else seen
    if id(node) in seen:
        place = f"{origins.name}:{node.start_mark.line + 1}"
        raise InputError(
            "YAML aliases are not allowed", field=prefix.removesuffix("."), hint="Write the value out.", place=place
        )
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _record_lines(item, f"{prefix}{number}.", origins, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError("keys are plain words", got=_node_kind(key_node), place=f"{origins.name}:{line}")
        key = f"{prefix}{key_node.value}"
        if key in origins.lines:
            first = origins.lines[key]
            raise InputError(f"given twice, first on line {first}", field=key, place=f"{origins.name}:{line}")
        origins.lines[key] = line
        _record_lines(value_node, f"{key}.", origins, seen)


def _apply_override(values: dict[str, Any], override: str, origins: _KeyLocations) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    *parents, last = key.split(".")
    if not equals or not all((*parents, last)):
        raise _malformed(override)
    origins.overrides[key] = override
    value = _parse_override_value(text, override)
    target = values
    for depth, parent in enumerate(parents):
        child = target.setdefault(parent, {})
        if not isinstance(child, dict):
            section = ".".join(parents[: depth + 1])
            raise InputError("a value, not a section", field=section, got=child, place=f"--set {override}")
        target = child
    target[last] = value


def _drop_unsupported_options(values: dict[str, Any], origins: _KeyLocations) -> None:
    """If `--set` names the update rule, drop the document's options that this rule does not have."""
    if "train.optimizer.name" not in origins.overrides:
        return
    section = values["train"]["optimizer"]
    if section["name"] not in OPTIMIZER_NAMES:
        return  # for the model to refuse
    for option in [name for name in section if section["name"] not in optimizers_with(name)]:
        key = f"train.optimizer.{option}"
        if not any(name == key or name.startswith(f"{key}.") for name in origins.overrides):
            del section[option]


def _parse_override_value(text: str, override: str) -> Any:
    """The value of `a.b=<text>` as in a document; what only looks like YAML (a URL with a colon, say) is text."""
    if not text.strip():
        return ""
    try:
        return _parse(f"value: {text}", _KeyLocations(f"--set {override}"))["value"]
    except NotYaml:
        return text


def _malformed(override: str) -> InputError:
    return InputError("write it as section.key=value", field=f"--set {override}")


def _format_errors(item: Any, origins: _KeyLocations, model: type[BaseModel]) -> InputError:
    """Return one of pydantic's errors as the user gets it."""
    key = ".".join(str(part) for part in item["loc"])
    context = item.get("ctx", {})
    if item["type"] == "conflict":
        key = f"{key}.{context['key']}" if key else context["key"]
        problem, got, hint = context["problem"], context["got"], context["hint"]
    elif item["type"] == "extra_forbidden":
        problem, got, hint = "unknown key", ABSENT, _suggestion(key, model)
    else:
        message = str(item["msg"]).removeprefix("Value error, ")
        problem, got, hint = message[:1].lower() + message[1:], item["input"] if key else ABSENT, ""
    return InputError(problem, field=key, got=got, hint=hint, place=origins.locate(key))


def _suggestion(key: str, model: type[BaseModel]) -> str:
    parent, _, last = key.rpartition(".")
    names = _keys_under(parent, model)
    close = difflib.get_close_matches(last, names, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {parent + '.' if parent else ''}{close[0]}?"
    elsewhere = [name for name in _walk_options(model, "") if name.rpartition(".")[2] == last]
    if elsewhere:
        return f"Did you mean {elsewhere[0]}?"
    return f"Valid here: {', '.join(names)}" if names else ""


def _keys_under(section: str, model: type[BaseModel]) -> list[str]:
    """The keys of a section; the number of an entry in a list of sections is passed over."""
    for part in section.split(".") if section else ():
        if part.isdigit():
            continue
        found = section_of(model.model_fields[part].annotation) if part in model.model_fields else None
        if found is None:
            return []
        model = found
    return list(model.model_fields)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, alone, as an option or in a list; None if it holds a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(section_of, get_args(annotation)) if found is not None), None)


def option_names() -> list[str]:
    """Every dotted option of a run document, in order."""
    return list(_walk_options(RunConfig, ""))


def _walk_options(model: type[BaseModel], prefix: str) -> Iterable[str]:
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _walk_options(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
