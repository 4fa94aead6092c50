"""What a person sees while stages run: one progress line for packing, and the table at the end."""

import sys
from typing import TextIO

from podscale.rundir import Outcome
from podscale.shards.progress import Update

BAR = 24
"""Characters of the progress bar."""
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
    """One line about packing that is drawn again and again on a terminal; silent elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._drawn = False

    def __call__(self, update: Update) -> None:
        """Draws where the packer stands."""
        if self._on_terminal:
            self._stream.write(f"\r\x1b[2K{progress_text(update)}")
            self._stream.flush()
            self._drawn = True

    def clear(self) -> None:
        """Removes the line, so that other text can follow."""
        if self._drawn:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._drawn = False


def progress_text(update: Update) -> str:
    """Bar, share, images, images/s and time left; without a total, only what is known."""
    parts = [f"{update.stage:<6}"]
    if update.total:
        filled = min(BAR, BAR * update.images // update.total)
        parts.append(f"[{'#' * filled}{'.' * (BAR - filled)}] {update.images / update.total:4.0%}")
    parts.append(count(update.images, "image"))
    if update.images_per_second:
        parts.append(f"{update.images_per_second:,.0f} images/s")
    if update.seconds_left:
        parts.append(f"{duration(update.seconds_left)} left")
    if update.rejects:
        parts.append(f"{update.rejects:,} unusable")
    return "  ".join(parts)


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
