"""Environment variables: one table with all of them, its page, and the readers of each kind."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.util import env
from tests.support.refusals import refused
from tools.environment_reference import TARGET, render

ROOT = Path(__file__).resolve().parents[3]
NAME = re.compile(r"PODSCALE_[A-Z][A-Z_]*")
VARIABLES = {variable.name: variable for variable in (*env.VARIABLES, *env.OTHER_VARIABLES)}
OTHER_NAME = re.compile("[\"'](" + "|".join(variable.name for variable in env.OTHER_VARIABLES) + ")[\"']")
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for top in ("podscale", "components", "pipelines")
    for path in sorted((ROOT / top).rglob("*.py"))
    if path != Path(env.__file__)
}
USED = {constant for text in SOURCES.values() for constant in re.findall(r"\benv\.([A-Z_]+)\b", text)}
READERS = {
    "number": {"read_number", "require_number", "number"},
    "process id": {"read_number", "require_number"},
    "seconds": {"read_seconds"},
    "path": {"read_path", "require_path"},
    "host:port": {"", "number"},
}
"""Functions of `env` that read a kind; a value of another kind is text."""


def test_only_the_table_names_variables() -> None:
    elsewhere = {str(path.relative_to(ROOT)): found for path, text in SOURCES.items() if (found := NAME.findall(text))}
    assert elsewhere == {}, "name them in podscale/util/env.py and import the constant"


def test_only_the_table_has_the_names_of_other_programs() -> None:
    elsewhere = {str(path): found for path, text in SOURCES.items() if (found := OTHER_NAME.findall(text))}
    assert elsewhere == {}, "use the constant of podscale/util/env.py"


@pytest.mark.parametrize("name", VARIABLES)
def test_every_entry_has_a_constant_that_is_used(name: str) -> None:
    constant = name.removeprefix(env.PREFIX)
    assert getattr(env, constant) == name
    assert constant in USED, "nothing reads or writes it"


def test_every_constant_has_an_entry() -> None:
    constants = {value for value in vars(env).values() if isinstance(value, str) and NAME.fullmatch(value)}
    assert sorted(variable.name for variable in env.VARIABLES) == sorted(constants)


def reads(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, function of `env` and variable of each value that is read; the function is "" for a mapping."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Subscript(slice=ast.Attribute(value=ast.Name(id="env"), attr=constant), ctx=ast.Load()):
                yield node.lineno, "", getattr(env, constant)
            case ast.Call(
                func=ast.Attribute(value=owner, attr=function),
                args=[ast.Attribute(value=ast.Name(id="env"), attr=constant), *_],
            ):
                is_ours = isinstance(owner, ast.Name) and owner.id == "env"
                if is_ours or function == "get":
                    yield node.lineno, function if is_ours else "", getattr(env, constant)


def test_each_kind_is_read_by_its_own_reader() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name} is a {VARIABLES[name].kind}, read by {function or 'no reader'}"
        for path, text in SOURCES.items()
        if re.search(r"\benv\.[A-Z]", text)
        for line, function, name in reads(text)
        if function not in READERS.get(VARIABLES[name].kind, {"", "require_text"})
    ]
    assert not wrong, "\n".join(wrong)


def test_the_page_is_what_the_table_says() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), "run: python tools/environment_reference.py"


def test_readers_return_none_for_what_is_absent_or_empty() -> None:
    for environment in ({}, {env.FENCE: ""}):
        assert env.read_number(env.FENCE, environment) is None
        assert env.read_seconds(env.FENCE, environment) is None
        assert env.read_path(env.FENCE, environment) is None


def test_a_variable_that_a_process_needs_is_named() -> None:
    for environment in ({}, {env.RANK_DIR: ""}):
        with refused(field=env.RANK_DIR):
            env.require_path(env.RANK_DIR, environment)
    for environment in ({}, {env.MASTER_PORT: ""}, {env.MASTER_PORT: "many"}):
        with refused(field=env.MASTER_PORT):
            env.require_number(env.MASTER_PORT, environment)
    assert env.require_number(env.MASTER_PORT, {env.MASTER_PORT: "29500"}) == 29500
    assert env.require_path(env.RANK_DIR, {env.RANK_DIR: "/run"}) == Path("/run")


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
