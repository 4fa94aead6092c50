"""Every `podscale ...` command of README.md, benchmarks/README.md and docs/ parses; none is run.

`text` blocks are output, not commands.
"""

import itertools
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from podscale.cli import UsageError, app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^ *```(?P<kind>\S*)\n(?P<content>.*?)^ *```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`(podscale [^`]+)`")
IN_CONTAINERS = ("podman", "docker")


def documented(text: str) -> Iterator[str]:
    """Return the commands of a page: those of code blocks, and those between backticks, which may span two lines."""
    for block in FENCE.finditer(text):
        if block["kind"] != "text":
            yield from block["content"].replace("\\\n", " ").splitlines()
    yield from (" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text)))


def arguments(line: str) -> list[str] | None:
    """Return the arguments of `podscale` on a line, up to a pipe or a comment; None if it starts another program."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    try:
        found = list(itertools.takewhile(lambda word: word[0] not in "|;&<>", (word or " " for word in lexer)))
    except ValueError:  # a quotation that spans several lines: no command of ours
        return None
    if found and found[0] in IN_CONTAINERS and "podscale" in found:
        return found[len(found) - found[::-1].index("podscale") :]
    return found[1:] if found and Path(found[0]).name == "podscale" else None


@cache
def program() -> Any:
    """Return the command `podscale`, which takes longer to build than to parse with."""
    return typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Raise WrongUsage if the command line would refuse the arguments; a group may be named without a command.

    Options of `podscale` itself are only looked up: some act while they are parsed, as --install-completion does.
    """
    command = program()
    if words[0].startswith("-"):
        assert any(words[0] in option.opts for option in command.params), words
        return
    context = command.make_context("podscale", list(words))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        if hasattr(command, "resolve_command") and not rest:
            return
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_parse(page: Path) -> None:
    refused = []
    for line in documented(page.read_text(encoding="utf-8")):
        words = arguments(line)
        if not words or (page.parent.name == "modules" and len(words) == 1):  # a docstring may name a command alone
            continue
        try:
            parse(words)
        except UsageError as error:
            refused.append(f"{line}: {error.format_message()}")
    assert not refused


def test_commands_are_found_and_wrong_ones_refused() -> None:
    page = "```\npodscale a \\\n  b\n```\n\n```text\npodscale 0.2.0\n```\n\nand `podscale c\nd`\n"
    assert [" ".join(line.split()) for line in documented(page)] == ["podscale a b", "podscale c d"]
    found = [arguments(line) for page in PAGES for line in documented(page.read_text(encoding="utf-8"))]
    assert len([words for words in found if words]) > 60
    assert arguments("podscale run digits --set a='b c' | less  # see") == ["run", "digits", "--set", "a=b c"]
    assert arguments("podman run --rm image podscale doctor --json") == ["doctor", "--json"]
    assert arguments("helm install podscale charts/podscale") is None
    for wrong in (["rnu"], ["presets", "--namespace", "x"], ["pipeline", "run", "--defaults"]):
        with pytest.raises(UsageError):
            parse(wrong)
