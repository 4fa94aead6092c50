"""What a person sees while stages run: one progress line for long work, and the table at the end."""

import sys
import time
from typing import TextIO

from podscale.rundir import Outcome

REDRAW_SECONDS = 0.1
GOAL = 0.10
"""The pipeline's own share of the time should stay below this."""


def count(number: int, noun: str) -> str:
    """1234, 'image' -> '1,234 images'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """75 -> '1:15'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressLine:
    """One line that is drawn again and again on a terminal: bar, share, images/s, time left. Silent elsewhere."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name = name
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._began: tuple[float, int] | None = None
        self._drawn = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Draws `done` of `total` images, at most ten times a second."""
        now = time.monotonic()
        if not self._on_terminal or total <= 0 or now - self._drawn < REDRAW_SECONDS:
            return
        self._began = self._began or (now, done)
        self._drawn = now
        self._stream.write(f"\r\x1b[2K{self.line(done, total, now)}")
        self._stream.flush()

    def line(self, done: int, total: int, now: float) -> str:
        """The text of the line at time `now`."""
        began, first = self._began or (now, done)
        filled = 24 * done // total
        text = f"{self._name:<9} [{'#' * filled}{'.' * (24 - filled)}] {done / total:4.0%}"
        if now > began and done > first:
            speed = (done - first) / (now - began)
            text += f"  {speed:,.0f} images/s  {duration((total - done) / speed)} left"
        return text

    def clear(self) -> None:
        """Removes the line, so that other text can follow."""
        if self._on_terminal and self._began is not None:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._began = None


def stage_table(outcomes: dict[str, Outcome], seconds: float) -> str:
    """Seconds and share of each stage of a launch, and of the pipeline around them.

    seconds: wall time of the whole launch.
    """
    spent = {stage: 0.0 if outcome.reused else outcome.seconds for stage, outcome in outcomes.items()}
    overhead = max(0.0, seconds - sum(spent.values()))
    lines = [f"{'stage':<10}{'seconds':>9}{'share':>8}"]
    for stage, outcome in outcomes.items():
        note = "  finished before" if outcome.reused else "" if outcome.done else f"  exit code {outcome.exit_code}"
        lines.append(f"{stage:<10}{spent[stage]:>9.1f}{spent[stage] / seconds:>8.0%}{note}")
    goal = f"  (goal: below {GOAL:.0%})" if any(spent.values()) else ""
    lines.append(f"{'pipeline':<10}{overhead:>9.1f}{overhead / seconds:>8.0%}{goal}")
    lines.append(f"{'total':<10}{seconds:>9.1f}")
    return "\n".join(lines)
