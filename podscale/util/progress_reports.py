"""Progress updates of long work, at most ten times a second."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from podscale.util import env

ProgressStage = Literal["list", "pack", "merge", "verify", "index", "evaluate", "predict"]


@dataclass(frozen=True)
class ProgressUpdate:
    """Progress of a stage. `total` is 0 if unknown; rates are means since the stage began."""

    stage: ProgressStage
    images: int
    total: int
    bytes: int = 0
    rejects: int = 0
    seconds: float = 0.0
    done: bool = False

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at the rate so far; None if unknown."""
        if not self.total or not self.images:
            return None
        return (self.total - self.images) * self.seconds / self.images


ProgressCallback = Callable[[ProgressUpdate], None]


def ignore_progress(progress: ProgressUpdate) -> None:
    """Ignore the update."""


def write_progress_to(path: Path) -> ProgressCallback:
    """Return a callback that keeps the newest update in a file; disk errors are ignored."""

    def write_update(progress: ProgressUpdate) -> None:
        part = path.with_suffix(".part")
        with suppress(OSError):
            part.write_text(json.dumps(asdict(progress)), encoding="ascii")
            part.replace(path)

    return write_update


def progress_from_env() -> ProgressCallback:
    """Return the callback that the launcher asked for, or `ignore_progress`."""
    path = env.read_path(env.PROGRESS_FILE)
    return write_progress_to(path) if path else ignore_progress


def read_progress(path: Path) -> ProgressUpdate | None:
    """Return the newest update in a file; None if there is none."""
    try:
        return ProgressUpdate(**json.loads(path.read_text(encoding="ascii")))
    except (OSError, ValueError, TypeError):
        return None


class ProgressReporter:
    """Counter of a stage's images (`total`: 0 if unknown) that reports at most ten times a second."""

    INTERVAL_SECONDS = 0.1

    def __init__(self, stage: ProgressStage, callback: ProgressCallback, total: int = 0) -> None:
        self._stage, self._callback, self._total = stage, callback, total
        self._images = self._bytes = self._rejects = 0
        self._start = self._last = time.monotonic()

    def add(self, images: int, size: int = 0, rejects: int = 0) -> None:
        """Count more images, with `size` bytes, and rejects."""
        self.set(self._images + images, self._bytes + size, self._rejects + rejects)

    def set(self, images: int, size: int, rejects: int) -> None:
        """Set the counts since the start; `size` is in bytes."""
        self._images, self._bytes, self._rejects = images, size, rejects
        if images % 256 == 0 or self._stage != "list":  # listing is too fast to read the clock for each image
            now = time.monotonic()
            if now - self._last >= self.INTERVAL_SECONDS:
                self._last = now
                self._notify(False)

    def close(self) -> None:
        self._notify(True)

    def _notify(self, done: bool) -> None:
        seconds = time.monotonic() - self._start
        self._callback(
            ProgressUpdate(self._stage, self._images, self._total, self._bytes, self._rejects, seconds, done)
        )
