"""Environment variables: one table with all of them, and its page."""

import re
from pathlib import Path

import pytest

from podscale.util import env
from tests.support.refusals import refused
from tools.environment_reference import TARGET, render

ROOT = Path(__file__).resolve().parents[3]
NAME = re.compile(r"PODSCALE_[A-Z][A-Z_]*")
NAMES = [variable.name for variable in env.VARIABLES]
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for top in ("podscale", "components", "pipelines")
    for path in sorted((ROOT / top).rglob("*.py"))
    if path != Path(env.__file__)
}


def test_only_the_table_names_variables() -> None:
    elsewhere = {str(path.relative_to(ROOT)): found for path, text in SOURCES.items() if (found := NAME.findall(text))}
    assert elsewhere == {}, "name them in podscale/util/env.py and import the constant"


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_has_a_constant_that_is_used(name: str) -> None:
    constant = name.removeprefix(env.PREFIX)
    assert getattr(env, constant) == name
    assert any(re.search(rf"\benv\.{constant}\b", text) for text in SOURCES.values()), "nothing reads or writes it"


def test_every_constant_has_an_entry() -> None:
    constants = {value for value in vars(env).values() if isinstance(value, str) and NAME.fullmatch(value)}
    assert sorted(NAMES) == sorted(constants)


def test_the_page_is_what_the_table_says() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), "run: python tools/environment_reference.py"


def test_readers_return_none_for_what_is_absent_or_empty() -> None:
    for environment in ({}, {env.FENCE: ""}):
        assert env.read_number(env.FENCE, environment) is None
        assert env.read_seconds(env.FENCE, environment) is None
        assert env.read_path(env.FENCE, environment) is None


def test_readers_return_typed_values() -> None:
    environment = {env.FENCE: "7", env.LEASE_PATIENCE: "1.5", env.LEASE: "/run/lease"}
    assert env.read_number(env.FENCE, environment) == 7
    assert env.read_seconds(env.LEASE_PATIENCE, environment) == 1.5
    assert env.read_path(env.LEASE, environment) == Path("/run/lease")


def test_readers_name_the_variable_that_is_wrong() -> None:
    with refused(field=env.FENCE, got="x"):
        env.read_number(env.FENCE, {env.FENCE: "x"})
    with refused(field=env.LEASE_PATIENCE, got="soon"):
        env.read_seconds(env.LEASE_PATIENCE, {env.LEASE_PATIENCE: "soon"})
