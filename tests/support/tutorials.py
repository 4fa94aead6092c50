"""Tutorial pages: their command blocks, run by one bash on a terminal as a reader types them.

A tutorial has two kinds of fenced block. `bash` holds commands. `text` holds what the block above it prints; a line of
`...` stands for any number of lines, and `...` within a line for any text. A paragraph `*Not run by a test: REASON.*`
above a `bash` block leaves that block out.
"""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
COLUMNS = 110

FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LEFT_OUT = re.compile(r"^\*Not run by a test: ([^*]+)\*\s*$")
MARKER = "@@ tutorial block "
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NUMBER = re.compile(r"(?P<hash>\b[0-9a-f]{16}\b)|(?P<number>\d[\d,]*(?:[.:]\d+)*(?:e-?\d+)?)(?P<unit>%| images/s)?")


@dataclass
class Block:
    """Commands of a page, from `line` on; `reason` is why no test runs them, or None."""

    line: int
    commands: str
    reason: str | None
    printed: list[str] = field(default_factory=list)


def read_blocks(text: str) -> list[Block]:
    """Return the command blocks of a page; raises ValueError for a block of another kind."""
    blocks: list[Block] = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        kind, content = match.groups()
        if kind == "bash":
            paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2].replace("\n", " ")
            left_out = LEFT_OUT.match(paragraph)
            blocks.append(Block(line, content, left_out[1] if left_out else None))
        elif kind == "text" and blocks:
            blocks[-1].printed += content.splitlines()
        else:
            raise ValueError(f"line {line}: a block of a tutorial is bash, or text below it (got {kind!r})")
    return blocks


@dataclass(frozen=True)
class Ended:
    """Exit code of the shell, and the lines that each block printed, by the line of the block."""

    code: int
    printed: dict[int, list[str]]

    @property
    def last(self) -> str:
        """The block that ran last, for a failed test's message."""
        line, lines = list(self.printed.items())[-1]
        return f"block at line {line} ended with {self.code}:\n" + "\n".join(lines[-60:])


def run_blocks(blocks: Sequence[Block], folder: Path, seconds: float) -> Ended:
    """Run the blocks that are not left out in one bash in `folder`, which stops at the first command that fails."""
    script = ["set -e -o pipefail"]
    for block in blocks:
        if block.reason is None:
            script += [f"echo; echo '{MARKER}{block.line}'", block.commands]
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": str(COLUMNS)}
    environment = {**os.environ, "TERM": "xterm", **path}
    (folder.parent / f"{folder.name}.sh").write_text("\n".join(script), encoding="utf-8")
    code, text = _on_terminal(["bash", f"../{folder.name}.sh"], folder, environment, seconds)
    printed: dict[int, list[str]] = {}
    for line in ESCAPE.sub("", text).replace("\r", "\n").splitlines():
        if line.startswith(MARKER):
            printed[int(line.removeprefix(MARKER))] = []
        elif printed and line.strip():
            next(reversed(printed.values())).append(line)
    return Ended(code, printed)


def _on_terminal(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float
) -> tuple[int, str]:
    """Return the exit code of a command and what it wrote to its terminal; kill its process group when time is up."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        text = b"".join(_chunks(leader)).decode("utf-8", "replace")
        return process.wait(), text
    finally:
        timer.cancel()
        os.close(leader)


def _chunks(leader: int) -> Iterator[bytes]:
    """Yield what arrives at the terminal until every process has closed it, which Linux reports as an OSError."""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:
            return
        if not chunk:
            return
        yield chunk


def missing_line(expected: Sequence[str], printed: Sequence[str]) -> str | None:
    """Return the first expected line that does not follow the one before it in `printed`; None if all do.

    Whole numbers must agree. Shares in percent, images/s, hashes and numbers with a point or colon may differ.
    """
    lines = iter(printed)
    for wanted in expected:
        if wanted.strip() in ("", "..."):
            continue
        pattern = re.compile(_pattern(" ".join(wanted.split())))
        if not any(pattern.fullmatch(" ".join(line.split())) for line in lines):
            return wanted
    return None


def _pattern(line: str) -> str:
    """Return the regular expression of an expected line."""
    parts, end = [], 0
    for match in NUMBER.finditer(line):
        parts.append(_text_pattern(line[end : match.start()]))
        number, unit = match["number"], match["unit"]
        if match["hash"]:
            parts.append("[0-9a-f]{16}")
        elif unit or any(character in number for character in ".:e"):
            parts.append(r"\d[\d,.:]*(?:e-?\d+)?" + re.escape(unit or ""))
        else:
            parts.append(re.escape(number))
        end = match.end()
    return "".join([*parts, _text_pattern(line[end:])])


def _text_pattern(text: str) -> str:
    return ".*".join(re.escape(part) for part in text.split("..."))


def assert_tutorial_runs(page: Path, folder: Path, seconds: float) -> Ended:
    """Run the commands of `page` in `folder`, and assert that they succeed and print what the page shows."""
    blocks = read_blocks(page.read_text(encoding="utf-8"))
    ended = run_blocks(blocks, folder, seconds)
    assert ended.code == 0, ended.last
    for block in blocks:
        if block.reason is None:
            printed = ended.printed[block.line]
            missing = missing_line(block.printed, printed)
            assert missing is None, f"{page.name}:{block.line} does not print {missing!r}:\n" + "\n".join(printed)
    return ended
