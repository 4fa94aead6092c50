"""Check the links of every Markdown page: `python -m tools.markdown_links`, part of `make lint`.

A relative link names a file or folder of the repository, and its `#anchor` a heading of that page, by GitHub's rule for
the ids of headings. Links in code, in comments and to other sites are not checked.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]

_FENCE = re.compile(r"^[ >]*(```+|~~~+)[^\n]*\n.*?(?:^[ >]*\1[`~]*[ ]*$|\Z)", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
_TARGETS = (
    re.compile(r"\]\(\s*<?(?P<target>[^\s()<>]+(?:\([^\s()]*\)[^\s()<>]*)?)>?(?:\s+(?:\"[^\"]*\"|'[^']*'))?\s*\)"),
    re.compile(r"^ {0,3}\[[^\]\n]+\]:\s*<?(?P<target>[^\s<>]+)", re.MULTILINE),
    re.compile(r"<(?:a|img|source)\b[^>]*?\s(?:href|src|srcset)=\"(?P<target>[^\"]+)\"", re.IGNORECASE),
)
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)
_HTML_ID = re.compile(r"<\w+\b[^>]*?\s(?:id|name)=\"([^\"]+)\"", re.IGNORECASE)
_INLINE_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:|//")


@dataclass(frozen=True)
class Link:
    """Link of a page.

    Args:
        target: Text between the parentheses, without a title.
        start: Offset of the target in the page, characters.
        line: Line of the target, from 1.
    """

    target: str
    start: int
    line: int

    @property
    def is_relative(self) -> bool:
        """True if the link leads to this repository."""
        return not _SCHEME.match(self.target)

    @property
    def path(self) -> str:
        return unquote(self.target.partition("#")[0].partition("?")[0])

    @property
    def anchor(self) -> str:
        return unquote(self.target.partition("#")[2])


def find_links(text: str) -> list[Link]:
    """Return the links and images of a page in order, without those in code and comments."""
    visible = _blank(_CODE_SPAN, _without_blocks(text))
    matches = (match for pattern in _TARGETS for match in pattern.finditer(visible))
    links = {match.start("target"): match["target"] for match in matches}
    return [Link(target, start, text.count("\n", 0, start) + 1) for start, target in sorted(links.items())]


def heading_anchors(text: str) -> set[str]:
    """Return the ids of the headings of a page, as GitHub makes them, and the ids of its HTML elements."""
    visible = _without_blocks(text)
    anchors, used = set(_HTML_ID.findall(_blank(_CODE_SPAN, visible))), Counter[str]()
    for heading in _HEADING.findall(visible):
        slug = heading_slug(heading)
        anchors.add(f"{slug}-{used[slug]}" if used[slug] else slug)
        used[slug] += 1
    return anchors


def heading_slug(heading: str) -> str:
    """Return the id of a heading: lower case, no punctuation, a hyphen for each space."""
    text = _INLINE_LINK.sub(r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def broken_links(page: Path, root: Path = ROOT) -> list[str]:
    """Return a message `page:line: problem` for each relative link of a page that leads nowhere."""
    text = page.read_text(encoding="utf-8")
    problems = ((link, _problem(link, page, root)) for link in find_links(text) if link.is_relative)
    return [f"{page.relative_to(root)}:{link.line}: {problem}" for link, problem in problems if problem]


def markdown_pages(root: Path = ROOT) -> list[Path]:
    """Return the Markdown pages that git does not ignore; outside a checkout, all of them."""
    if not (root / ".git").exists():
        return sorted(root.rglob("*.md"))
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "*.md"]
    names = subprocess.check_output(command, cwd=root, text=True).splitlines()
    return sorted(path for path in (root / name for name in names) if path.exists())


def _problem(link: Link, page: Path, root: Path) -> str | None:
    target = (page.parent / link.path).resolve() if link.path else page
    if not target.exists():
        return f"{link.target}: there is no such file"
    if not target.is_relative_to(root):
        return f"{link.target}: outside the repository"
    if link.anchor and target.suffix == ".md" and link.anchor not in _anchors_of(target):
        return f"{link.target}: the page has no such heading"
    return None


@cache
def _anchors_of(page: Path) -> set[str]:
    return heading_anchors(page.read_text(encoding="utf-8"))


def _without_blocks(text: str) -> str:
    return _blank(_COMMENT, _blank(_FENCE, text))


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """Replace matches by spaces, so that offsets and lines stay."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _all_broken_links() -> Iterator[str]:
    for page in markdown_pages():
        yield from broken_links(page)


if __name__ == "__main__":
    problems = list(_all_broken_links())
    print("\n".join(problems), end="\n" if problems else "")
    sys.exit(bool(problems))
