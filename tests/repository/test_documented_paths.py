"""Paths named in CONTRIBUTING.md, both README.md and docs/ exist; test_markdown_links.py checks the links."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "README.md", "benchmarks/README.md")]
PAGES = [*TOP_PAGES, *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("benchmarks", "charts", "components", "docs", "images", "manifests", "pipelines", "podscale", "requirements")
TOPS = (*FOLDERS, "terraform", "tests", "tools")
NAMED = re.compile(rf"(?<![\w./:=@([}}\"-])(?!images/s\b)(?:{'|'.join(TOPS)})/[\w./*<>-]*[\w/*>]")
"""A path from the top of the repository: no target of a link, no address, no rate in images/s."""
MADE = {"requirements/cpu.txt": "tools/lock.sh writes it on request"}
"""Paths that a command makes, and the reason that they are absent here."""


def named_paths(text: str) -> Iterator[str]:
    """Yield the paths that a page names. `<name>` stands for any text, as `*` does."""
    yield from (re.sub(r"(<\w+>)+", "*", path) for path in NAMED.findall(text))


def missing_paths(text: str) -> set[str]:
    return {path for path in named_paths(text) if path not in MADE and not any(ROOT.glob(path.rstrip("/")))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_paths_exist(page: Path) -> None:
    assert missing_paths(page.read_text(encoding="utf-8")) == set()


def test_a_lost_path_is_found() -> None:
    assert missing_paths("`podscale/engine/`, `tests/unit/test_order_*.py`") == {
        "podscale/engine/",
        "tests/unit/test_order_*.py",
    }
    assert missing_paths("`podscale/pytorch/optim/<name>.py`, 400 images/s, [x](docs/gone.md)") == set()
