"""values.yaml, its schema, its reference and the templates agree."""

import random
import re
from ipaddress import IPv6Network
from typing import Any

import pytest
import yaml

from podscale.config import RunConfig
from podscale.version import VERSION
from tests.support.helm import CHART, ROOT
from tools.chart_values import README, SCHEMA, SHARED, VALUES, Value, read, render

TEMPLATES = "\n".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").rglob("*.*"))
RANGED = {
    "serviceAccounts": "range $role, $account := .Values.serviceAccounts",
    "metrics.thresholds": "range $name, $number := $metrics.thresholds",
}


def values() -> list[Value]:
    return [value for value in read(VALUES.read_text(encoding="utf-8")) if not value.section]


@pytest.mark.parametrize("target", [SCHEMA, README], ids=lambda path: path.name)
def test_generated_files_are_current(target: Any) -> None:
    assert target.read_text(encoding="utf-8") == render()[target], "run: make chart"


def test_a_value_without_a_description_is_refused() -> None:
    with pytest.raises(ValueError, match=r"images\.new"):
        read("images:\n  # -- Described.\n  old: 1\n\n  new: 2\n")


def test_every_value_is_read() -> None:
    """Each path appears in the templates, either in full or relative to a variable bound to its parent."""
    bound = re.findall(r"(\$\w+) := \.Values\.([\w.]+) ", TEMPLATES)  # two templates may use one name for two paths
    prefixes = {(".Values.", ""), *((f"{variable}.", f"{path}.") for variable, path in bound)}
    used = {
        value.name
        for value in values()
        for variable, path in prefixes
        if value.name.startswith(path) and variable + value.name.removeprefix(path) in TEMPLATES
    }
    used |= {f"images.{name}" for name in re.findall(r'podscale\.image" \(list . "(\w+)"\)', TEMPLATES)}
    used |= {f"images.{name}" for name in ("registry", "tag") if f"$images.{name}" in TEMPLATES}
    assert all(text in TEMPLATES for text in RANGED.values())
    ranged = tuple(f"{name}." for name in RANGED)
    unused = [value.name for value in values() if value.name not in used and not value.name.startswith(ranged)]
    assert not unused


def test_the_chart_is_of_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == VERSION


def test_every_preset_is_valid_as_defaults() -> None:
    """The schema of `defaults` is that of run documents: both reject the same values, and presets pass."""
    import json

    import jsonschema

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    part = {"$ref": "#/$defs/RunConfig", "$defs": schema["$defs"]}
    validator = jsonschema.Draft202012Validator(part)
    validator.check_schema(part)  # once: it takes longer than all presets
    for path in sorted((ROOT / "pipelines" / "presets").glob("*.yaml")):
        validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    with pytest.raises(jsonschema.ValidationError, match="hardwar"):
        validator.validate({"launch": {"hardwar": "nvidia-l4"}})
    assert set(schema["$defs"]["RunConfig"]["properties"]) == set(RunConfig.model_fields)


def test_the_pattern_of_ranges_accepts_what_the_ipaddress_module_accepts() -> None:
    pattern = re.compile(SHARED["cidr"]["pattern"])
    source = random.Random(0)
    parts = ["", ":", ":", ":", "::", "0", "a", "1f", "fd00", "12345"]
    addresses = {"".join(source.choices(parts, k=source.randint(1, 16))) for _ in range(20_000)}
    addresses |= {f"{left}::{right}" for left in GROUPS for right in GROUPS} | set(GROUPS)
    texts = [f"{address}/{bits}" for address in sorted(addresses) for bits in (0, 128, 129)]
    accepted = [text for text in texts if pattern.search(text)]
    assert accepted == [text for text in texts if is_ipv6_range(text)]
    assert len(accepted) > 100


GROUPS = [":".join(["1"] * count) for count in range(9)]
"""0 to 8 groups of an IPv6 address."""


def is_ipv6_range(text: str) -> bool:
    try:
        IPv6Network(text, strict=False)
    except ValueError:
        return False
    return True
