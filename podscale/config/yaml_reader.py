"""YAML of documents: scalars as in YAML 1.2, the line of each key, and no tags, duplicate keys or aliases.

Aliases are refused because they can expand a small file without limit. In YAML 1.2, `1e-4` is a number, 010 is ten, and
`no`, 1:30 and dates are text.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from podscale.errors import InputError
from podscale.util.libyaml import SafeDumper, SafeLoader

_MAX_DEPTH = 100
"""Most levels of nesting: libyaml composes a document by recursion, which would overflow the stack."""
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_CORE_SCHEMA = (  # YAML 1.2.2, section 10.3.2; the order decides if two match
    ("null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^(?=.{1,3000}$)([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
)


class _DocumentLoader(SafeLoader):
    """Safe loader with the scalars of YAML 1.2."""


_DocumentLoader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _CORE_SCHEMA:
    _DocumentLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)


def _construct_int(loader: SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


_DocumentLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


class _DocumentDumper(SafeDumper):
    """Safe dumper that quotes text that any version of YAML would read as another type."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: SafeDumper, text: str) -> yaml.ScalarNode:
    """Escape Unicode line breaks, which YAML 1.1 folds too."""
    folds = any(c in text for c in "\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if folds else None)


_DocumentDumper.add_representer(str, _represent_text)
_DocumentDumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


class NotYaml(InputError):
    """Text that YAML cannot parse."""


@dataclass
class KeyLocations:
    """Lines of a document's dotted keys; `name` is the file or other origin of the text."""

    name: str
    lines: dict[str, int] = field(default_factory=dict)

    def at(self, line: int) -> str:
        return f"{self.name}:{line}"


def parse_yaml(text: str, locations: KeyLocations) -> dict[str, Any]:
    """Return the values of a document, and add the lines of its keys to `locations`.

    Raises NotYaml if the text is no YAML, InputError if it is no mapping, repeats a key or has an alias.
    """
    loader = None
    try:
        _check_depth(text, locations.name)
        loader = _DocumentLoader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise InputError("a document is a mapping of sections", got=_node_kind(node), location=locations.name)
        _record_lines(node, "", locations, set())
        values: dict[str, Any] = loader.construct_document(node)
        return values
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        location = locations.at(mark.line + 1) if mark else locations.name
        raise NotYaml(f"not valid YAML: {problem}", location=location) from None
    finally:
        if loader is not None:
            loader.dispose()


def _check_depth(text: str, location: str) -> None:
    """Raise NotYaml if the text is nested too deeply; yaml.YAMLError if it is no YAML."""
    depth = 0
    for event in yaml.parse(text, Loader=SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise NotYaml("not valid YAML: nested too deeply for a run document", location=location)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def dump_yaml(values: dict[str, Any]) -> str:
    text: str = yaml.dump(values, Dumper=_DocumentDumper, sort_keys=False, allow_unicode=True)
    return text


def _node_kind(node: yaml.Node) -> str:
    return "list" if isinstance(node, yaml.SequenceNode) else "single value"


def _record_lines(node: yaml.Node, prefix: str, locations: KeyLocations, seen: set[int]) -> None:
    if id(node) in seen:
        raise InputError(
            "YAML aliases are not allowed",
            field=prefix.removesuffix("."),
            hint="Write the value out.",
            location=locations.at(node.start_mark.line + 1),
        )
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _record_lines(item, f"{prefix}{number}.", locations, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError("keys are plain words", got=_node_kind(key_node), location=locations.at(line))
        key = f"{prefix}{key_node.value}"
        if key in locations.lines:
            problem = f"given twice, first on line {locations.lines[key]}"
            raise InputError(problem, field=key, location=locations.at(line))
        locations.lines[key] = line
        _record_lines(value_node, f"{key}.", locations, seen)
