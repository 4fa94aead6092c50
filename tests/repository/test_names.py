"""Defined names have no private words, and docstrings begin with a verb or a noun."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("podscale", "components", "pipelines", "benchmarks", "tools")

BANNED = {
    **dict.fromkeys(("life", "lives"), "launch"),
    "pulse": "heartbeat",
    "heed": "apply",
    **dict.fromkeys(("settle", "settled"), "resolve, run_due_actions"),
    "meeting": "rendezvous",
    **dict.fromkeys(("seat", "seats"), "rank env"),
    "whereabouts": "progress tracker",
    "census": "peer status",
    "comeback": "rejoin",
    **dict.fromkeys(("told", "tell", "tells", "hear", "heard"), "message, report, receive"),
    **dict.fromkeys(("speak", "spoken", "said"), "message, report, log"),
    **dict.fromkeys(("lent", "lend"), "swapped"),
    "vigil": "watch, wait",
    **dict.fromkeys(("trouble", "troubles"), "problem, failure"),
    "patience": "timeout, retry policy",
    "figures": "metrics, scores, values",
    **dict.fromkeys(("companion", "companions"), "owned objects"),
    "whence": "source, origin",
    **dict.fromkeys(("born", "unborn"), "started"),
    **dict.fromkeys(("carry", "carried"), "run, keep, state"),
    **dict.fromkeys(("lap", "laps"), "interval"),
    "notes": "heartbeat record, remarks",
    **dict.fromkeys(("orphan", "orphans"), "leftover process"),
    "stretch": "interval, range",
    **dict.fromkeys(("demand", "demands"), "request, required"),
    **dict.fromkeys(("shortage", "shortages"), "out of memory, deficit"),
    "lacking": "missing",
    **dict.fromkeys(("arm", "arms"), "group"),
    "imaginary": "synthetic",
    "outline": "dry run, summary",
    **dict.fromkeys(("stand", "standing"), "status, fake"),
}
"""Private words, as whole parts of a name, and the field's terms to use instead."""

EXEMPT = {
    "LIFE_BEGAN": "named like its environment variable",
    "LEASE_PATIENCE": "named like its environment variable",
    "carry": "state of a jax.lax.scan",
    "whence": "parameter of io.IOBase.seek",
}
"""Names that may contain a banned word, and the reason."""

OPENING = re.compile(r"\s*(What|How|Whether|Where|Who|Whose)\b")
"""Beginning of a docstring that is a question instead of a name or an action."""

PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def parts_of(name: str) -> list[str]:
    """Return the words of a snake_case or CamelCase name."""
    return [part.lower() for part in PARTS.findall(name)]


def banned_word(name: str) -> str | None:
    if name in EXEMPT:
        return None
    return next((part for part in parts_of(name) if part in BANNED), None)


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that a module defines, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.alias(asname=str()):
                yield str(node.asname), node.lineno
            case ast.ExceptHandler(name=str()) | ast.MatchAs(name=str()) | ast.MatchStar(name=str()):
                yield str(node.name), node.lineno
            case ast.MatchMapping(rest=str()):
                yield str(node.rest), node.lineno


def problems_of(tree: ast.Module, file: str) -> Iterator[str]:
    """Yield `file:line: problem` of each banned name and each docstring that begins with a question."""
    stem = Path(file).stem
    for name, line in [(stem, 1), *defined_names(tree)]:
        if word := banned_word(name):
            yield f"{file}:{line}: {name}: {word} -> {BANNED[word]}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if opening := OPENING.match(text):
                line = getattr(node, "lineno", 1)
                yield f'{file}:{line}: docstring begins with "{opening[1]}": {text.splitlines()[0]}'


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_are_words_of_the_field(folder: str) -> None:
    problems = [
        problem
        for path in sorted((ROOT / folder).rglob("*.py"))
        for problem in problems_of(ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT)))
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_exempt_names_exist_and_need_it() -> None:
    files = [path.read_text(encoding="utf-8") for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for name in EXEMPT:
        assert set(parts_of(name)) & BANNED.keys()
        assert any(re.search(rf"\b{name}\b", text) for text in files), f"{name} is gone: remove it from the table"


def test_banned_words_are_found_in_every_kind_of_definition() -> None:
    source = '''
"""What it is."""
import os as pulse
class RankPulse:
    """How it goes."""
    life: int = 0
def heed(told, *lent, **seat):
    """Return it."""
    self.whereabouts = [born for born in told]
    with open(told) as (vigil, _):
        lambda census: census
    try:
        (heard := 1)
    except ValueError as trouble:
        pass
    match told:
        case {"a": said, **spoken}: pass
        case [comeback, *figures]: pass
'''
    problems = list(problems_of(ast.parse(source), "podscale/meeting.py"))
    words = {problem.rpartition(" -> ")[0].rpartition(": ")[2] for problem in problems if " -> " in problem}
    assert words == {
        *("meeting", "pulse", "life", "heed", "told", "lent", "seat", "whereabouts", "born", "vigil", "census"),
        *("heard", "trouble", "said", "spoken", "comeback", "figures"),
    }
    assert "podscale/meeting.py:7: heed: heed -> apply" in problems
    assert [problem.split(": ")[1] for problem in problems if " -> " not in problem] == [
        'docstring begins with "What"',
        'docstring begins with "How"',
    ]


@pytest.mark.parametrize(
    "name", ["lifetime", "lifecycle", "standard", "alarm", "overlap", "PodLifeline", "army", "map"]
)
def test_a_banned_word_inside_of_another_is_none(name: str) -> None:
    assert banned_word(name) is None
