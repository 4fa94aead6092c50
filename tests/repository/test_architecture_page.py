"""docs/explanation/architecture.md agrees with the code: picture, table of packages, lists of files."""

import re
from pathlib import Path

import pytest

from tests.repository.test_architecture import PACKAGES
from tools.architecture_picture import (
    PAGE,
    PICTURE,
    PURPOSES,
    imports_of_packages,
    layers_of,
    reduce_transitively,
    render_page,
    render_picture,
)

ROOT = Path(__file__).resolve().parents[2]
TEXT = PAGE.read_text(encoding="utf-8")
LONGEST = {"learning rate": 3, "rank dies": 12, "JPEG to the GPU": 8}
"""Number of files that may answer each question."""


def test_the_picture_shows_the_imports() -> None:
    assert PICTURE.read_text(encoding="utf-8") == render_picture(), "run: python -m tools.architecture_picture"


def test_the_table_is_that_of_the_architecture_test() -> None:
    assert render_page(TEXT) == TEXT, "run: python -m tools.architecture_picture"
    assert list(PURPOSES) == list(PACKAGES)


def test_arrows_that_follow_from_others_are_left_out() -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set[str]()}
    assert reduce_transitively(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}


def test_arrows_point_downwards() -> None:
    graph = reduce_transitively(imports_of_packages())
    layers = layers_of(graph)
    assert all(layers[other] < layers[package] for package, below in graph.items() for other in below)


def rows(question: str) -> dict[str, str]:
    """Return the part that each file of a question's list has."""
    (section,) = [part for part in re.split(r"^##+ ", TEXT, flags=re.MULTILINE) if question in part.partition("\n")[0]]
    found = re.findall(r"^\| `(podscale/[\w/]+\.py)` \| (.*) \|$", section, re.MULTILINE)
    assert len(found) == len(dict(found)), "a file is listed twice"
    return dict(found)


@pytest.mark.parametrize("question", LONGEST)
def test_each_question_is_answered_by_few_files(question: str) -> None:
    assert 0 < len(rows(question)) <= LONGEST[question]


@pytest.mark.parametrize("question", LONGEST)
def test_the_files_of_a_question_use_each_other(question: str) -> None:
    """A name in a file's row is defined there, and used in another file of the list."""
    parts = rows(question)
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in parts}
    names = [(file, name) for file, part in parts.items() for name in re.findall(r"`([\w.]+)`", part)]
    assert names
    for file, dotted in names:
        owner, _, name = dotted.rpartition(".")
        for defined in filter(None, (owner, name)):
            assert re.search(rf"^ *(class|def) {defined}\b", texts[file], re.MULTILINE), (
                f"{file} does not have {dotted}"
            )
        use = re.compile(rf"\.{name}\(" if owner else rf"\b{name}\b")
        assert any(use.search(text) for other, text in texts.items() if other != file), f"{dotted}: used elsewhere"


def test_the_tour_has_eight_files() -> None:
    tour = TEXT.partition("## A tour in eight files")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\d\. `podscale/[\w/]+\.py`", tour, re.MULTILINE)) == 8
