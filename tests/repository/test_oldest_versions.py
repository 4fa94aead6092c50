"""requirements/oldest.txt has the lower bounds of pyproject.toml, and no index address."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("torch", "timm", "hub", "export", "serve", "cluster")
"""Extras that tools/lock.sh resolves for it."""


def lower_bounds() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    found = {}
    for text in [*project["dependencies"], *(text for extra in EXTRAS for text in extras[extra])]:
        requirement = Requirement(text)
        if requirement.name != "podscale":
            (found[requirement.name],) = [each.version for each in requirement.specifier if each.operator == ">="]
    return found


PINS = re.findall(
    r"^([a-z0-9.-]+)==([^\s;]+)", (ROOT / "requirements/oldest.txt").read_text(encoding="utf-8"), flags=re.M
)
"""Names and versions; a name occurs again if a later Python needs a later version."""


@pytest.mark.parametrize(("name", "bound"), lower_bounds().items())
def test_the_lock_has_each_lower_bound(name: str, bound: str) -> None:
    """A bound without a patch release stands for its first release: `1` for 1.0.0."""
    versions = [version for pinned, version in PINS if pinned == name]
    assert Version(bound) in map(Version, versions), f"run `make lock`, or raise the bound to one of {versions}"


def test_the_lock_names_no_index() -> None:
    text = (ROOT / "requirements/oldest.txt").read_text(encoding="utf-8")
    assert not re.search(r"https?://|^--(extra-)?index", text, flags=re.M)
