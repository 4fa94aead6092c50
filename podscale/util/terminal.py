"""Terminal output: colours, a progress line that is redrawn in place, and the results of checks."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TextIO

from podscale.errors import ExitCode
from podscale.util.formatting import format_count, format_duration
from podscale.util.progress_reports import ProgressCallback, ProgressUpdate, ignore_progress

ANSI_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
BAR_WIDTH = 24
"""Characters of the progress bar."""


def supports_colours(stream: TextIO) -> bool:
    """Return True if `stream` is a terminal with colours and NO_COLOR is not set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return `text` in one or more styles ('bold green') if `stream` shows colours."""
    if not style or not text or not supports_colours(stream):
        return text
    return f"\x1b[{';'.join(ANSI_CODES[name] for name in style.split())}m{text}\x1b[0m"


def terminal_width() -> int:
    """Return the width of the terminal in characters."""
    return shutil.get_terminal_size((80, 24)).columns


class LineStream(io.StringIO):
    """Text stream that calls a function with each line; without a function, it discards them."""

    def __init__(self, callback: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._callback, self._rest = callback, ""

    def write(self, text: str) -> int:
        if self._callback is not None:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._callback(line)
        return len(text)


class ProgressLine:
    """Progress line that is redrawn in place on a terminal, else not shown. Clear it before other text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._on_terminal = stream.isatty()
        self._drawn = ""

    def __call__(self, progress: ProgressUpdate) -> None:
        """Draw the progress, or clear the line when the work is done."""
        if progress.done:
            self.clear()
        else:
            self.draw(format_progress(progress))

    def draw(self, text: str) -> None:
        """Show `text`, cut to the terminal's width."""
        if self._on_terminal and text != self._drawn:
            self._stream.write(f"\r\x1b[2K{text[: terminal_width() - 1]}")
            self._stream.flush()
            self._drawn = text

    def clear(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._drawn = ""


def progress_callback(progress: bool | ProgressCallback) -> ProgressCallback:
    """Return the callback of an argument: a function, True for a line on standard error, or False for nothing."""
    if callable(progress):
        return progress
    return ProgressLine(sys.stderr) if progress else ignore_progress


def format_progress(progress: ProgressUpdate) -> str:
    """Return bar, percentage, images, images/s and time left; without a total, images and images/s."""
    parts = [f"{progress.stage:<8}"]
    if progress.total:
        share = min(1.0, progress.images / progress.total)
        filled = int(BAR_WIDTH * share)
        parts.append(f"{'━' * filled}{'╌' * (BAR_WIDTH - filled)} {share:4.0%}")
        parts.append(f"{progress.images:,} of {format_count(progress.total, 'image')}")
    else:
        parts.append(format_count(progress.images, "image"))
    if progress.images_per_second:
        parts.append(f"{progress.images_per_second:,.0f} images/s")
    if progress.seconds_left is not None:
        parts.append(f"{format_duration(progress.seconds_left)} left")
    if progress.rejects:
        parts.append(f"{progress.rejects:,} unusable")
    return "  ".join(parts)


CheckStatus = Literal["ok", "note", "missing"]
STATUS_STYLES = {"ok": "green", "note": "yellow", "missing": "bold red"}


@dataclass(frozen=True)
class CheckResult:
    """Result of one check, with advice if something is missing."""

    subject: str
    verdict: CheckStatus
    found: str
    advice: str = ""


def print_check_results(results: Sequence[CheckResult], *, as_json: bool) -> int:
    """Print the results; return exit code 2 if something is missing."""
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print("\n".join(_result_lines(results)))
    return int(ExitCode.BAD_INPUT if any(result.verdict == "missing" for result in results) else ExitCode.DONE)


def _result_lines(results: Sequence[CheckResult]) -> Iterator[str]:
    width = max(len(result.subject) for result in results)
    for result in results:
        status = paint(f"{result.verdict:<7}", STATUS_STYLES[result.verdict], sys.stdout)
        advice = f" -> {result.advice}" if result.advice else ""
        yield f"{status}  {result.subject:<{width}}  {result.found}{advice}"
