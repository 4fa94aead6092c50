"""Every rule of tools/prose_lint.py finds what it is for, and nothing else."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

from tools.prose_lint import (
    EXEMPT_NAMES,
    FOLDERS,
    MAX_BODY_LINES,
    PRIVATE_WORDS,
    parts_of,
    private_word,
    problems_of,
)

ROOT = Path(__file__).resolve().parents[2]


def messages(source: str, file: str = "podscale/module.py") -> list[str]:
    return [str(problem) for problem in problems_of(ast.parse(source), file)]


def test_exempt_names_exist_and_need_it() -> None:
    files = [path.read_text(encoding="utf-8") for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for exempt in EXEMPT_NAMES:
        file, _, name = exempt.rpartition(":")
        assert not file or name in (ROOT / file).read_text(encoding="utf-8")
        assert set(parts_of(name)) & PRIVATE_WORDS.keys()
        assert any(re.search(rf"\b{name}\b", text) for text in files), f"{name} is gone: remove it from the table"


def test_private_words_are_found_in_every_kind_of_definition() -> None:
    source = '''
"""Name of it."""
import os as pulse
class RankPulse:
    """Heartbeat."""
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
    found = messages(source, "podscale/meeting.py")
    assert {re.search(r"`(\w+)`", message)[1] for message in found} == {  # type: ignore[index]
        *("meeting", "pulse", "life", "heed", "told", "lent", "seat", "whereabouts", "born", "vigil", "census"),
        *("heard", "trouble", "said", "spoken", "comeback", "figures"),
    }
    assert "podscale/meeting.py:7: heed: use another word for `heed` (apply)" in found


def test_a_name_may_be_exempt_in_one_file() -> None:
    source = "def findings(): pass"
    assert not messages(source, "components/steps.py")
    assert len(messages(source, "components/other.py")) == 1


@pytest.mark.parametrize(
    "name", ["lifetime", "lifecycle", "standard", "alarm", "overlap", "PodLifeline", "army", "map"]
)
def test_a_private_word_inside_of_another_is_none(name: str) -> None:
    assert private_word(name) is None


def test_a_class_of_one_ambiguous_word_is_found() -> None:
    assert len(messages("class Row: pass\nclass _Entry: pass\nclass ScoreRow: pass\nclass RowResult: pass\n")) == 2


def test_docstrings_that_begin_with_a_question_are_found() -> None:
    source = '"""What it is."""\nclass A:\n    """How it goes."""\n    def f(self):\n        """Whether it does."""\n'
    assert [message.split('"')[1] for message in messages(source)] == ["What", "How", "Whether"]
    assert not messages('"""Whatever is left, in bytes."""\n')


@pytest.mark.parametrize(("lines", "expected"), [(MAX_BODY_LINES, 0), (MAX_BODY_LINES + 1, 1)])
def test_long_bodies_are_found_and_parameters_do_not_count(lines: int, expected: int) -> None:
    function = "def f(\n    a,\n    b,\n):\n" + "    a += b\n" * lines
    assert len(messages(function)) == expected
    assert len(messages("class A:\n" + textwrap.indent(function, "    "))) == expected


ARRAYS = '''
def scale(x: Tensor, factor: int, *, weights: "npt.NDArray[np.float32] | None" = None) -> Tensor:
    """{doc}"""
class Rule(Base):
    def step(self, grads: jax.Array) -> None: ...
class Alone:
    def step(self, grads: jax.Array) -> None: ...
    def _step(self, grads: jax.Array) -> None: ...
class _Private:
    def step(self, grads: jax.Array) -> None: ...
'''


def test_array_parameters_that_no_docstring_names_are_found() -> None:
    found = messages(ARRAYS.format(doc="Return x times the factor."))
    assert [message.partition(": ")[0] for message in found] == ["podscale/module.py:2", "podscale/module.py:7"]
    assert "`weights` (npt.NDArray[np.float32] | None)" in found[0].replace("'", "")
    assert "`grads`" in found[1]
    assert len(messages(ARRAYS.format(doc="Scale x by weights, fp32 of shape (channels,)."))) == 1
    assert not messages(ARRAYS.format(doc=""), "benchmarks/module.py")


def test_numbers_whose_unit_neither_name_nor_docstring_gives_are_found() -> None:
    source = 'def wait(size: float, timeout_seconds: float, epoch: float, count: int) -> None:\n    """{doc}"""\n'
    (found,) = messages(source.format(doc="Wait."))
    assert "`size` (float)" in found
    assert not messages(source.format(doc="Wait for `size` bytes."))
    assert not messages(source.format(doc="Wait."), "benchmarks/module.py")
