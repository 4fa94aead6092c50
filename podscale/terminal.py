"""What a person sees on a terminal besides plain lines: colours, and one line of progress that is drawn again."""

import os
import shutil
from typing import TextIO

from podscale.progress import Update
from podscale.text import count, duration

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
BAR = 24
"""Characters of the progress bar."""


def colours(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that shows colours, and its owner wants them (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: TextIO) -> str:
    """`text` in one or more styles ('bold green') where `stream` shows colours; '' leaves it as it is."""
    if not style or not text or not colours(stream):
        return text
    return f"\x1b[{';'.join(STYLES[name] for name in style.split())}m{text}\x1b[0m"


def columns() -> int:
    """Characters in a line of the terminal."""
    return shutil.get_terminal_size((80, 24)).columns


class ProgressLine:
    """One line that is drawn again and again on a terminal; silent elsewhere. Clear it before other text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._on_terminal = stream.isatty()
        self._drawn = ""

    def __call__(self, update: Update) -> None:
        """Draws where long work stands, and removes the line when it is done."""
        if update.done:
            self.clear()
        else:
            self.draw(progress_text(update))

    def draw(self, text: str) -> None:
        """Shows `text`, cut to the terminal."""
        if self._on_terminal and text != self._drawn:
            self._stream.write(f"\r\x1b[2K{text[: columns() - 1]}")
            self._stream.flush()
            self._drawn = text

    def clear(self) -> None:
        """Removes the line, so that other text can follow."""
        if self._drawn:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._drawn = ""


def progress_text(update: Update) -> str:
    """Bar, share, images, images/s and time left; without a total, only what is known."""
    parts = [f"{update.stage:<8}"]
    if update.total:
        share = min(1.0, update.images / update.total)
        filled = int(BAR * share)
        parts.append(f"{'━' * filled}{'╌' * (BAR - filled)} {share:4.0%}")
        parts.append(f"{update.images:,} of {count(update.total, 'image')}")
    else:
        parts.append(count(update.images, "image"))
    if update.images_per_second:
        parts.append(f"{update.images_per_second:,.0f} images/s")
    if update.seconds_left is not None:
        parts.append(f"{duration(update.seconds_left)} left")
    if update.rejects:
        parts.append(f"{update.rejects:,} unusable")
    return "  ".join(parts)
