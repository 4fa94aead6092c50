"""Progress of packing: counters of each process, their sums, and the observer of a build.

Each packer adds to shared sums ten times a second. The building process reports them to the progress bar and to the
observer that exports metrics.
"""

import time
from collections.abc import Callable, Mapping
from multiprocessing.sharedctypes import Synchronized
from typing import Literal, NamedTuple, Protocol

from podscale.data.sharding.shard_plan import SPLITS
from podscale.util.progress_reports import ProgressReporter

BuildPhase = Literal["plan", "pack", "merge", "other"]


class PackProgress(NamedTuple):
    """Counts of packed images; `images` includes the rejects."""

    images: int = 0
    bytes_written: int = 0
    rejects: int = 0
    bytes_read: int = 0


class BuildObserver(Protocol):
    """Observer of a build, called on the building thread about ten times a second at most."""

    def phase_started(self, name: BuildPhase) -> None: ...

    def images_planned(self, split: str, images: int) -> None: ...

    def images_packed(self, split: str, so_far: PackProgress) -> None: ...

    def shard_finished(self, split: str, rejects: Mapping[str, int]) -> None: ...


class NullObserver:
    def phase_started(self, name: BuildPhase) -> None:
        pass

    def images_planned(self, split: str, images: int) -> None:
        pass

    def images_packed(self, split: str, so_far: PackProgress) -> None:
        pass

    def shard_finished(self, split: str, rejects: Mapping[str, int]) -> None:
        pass


NULL_OBSERVER = NullObserver()


SharedTotals = Mapping[str, "list[Synchronized[int]]"]
"""Per split, one number for each field of PackProgress, shared with the packing processes."""


class PackerCounter:
    """Counter of a packer's images that calls `callback` ten times a second and on `flush`."""

    def __init__(self, callback: Callable[[PackProgress], None]) -> None:
        self._callback = callback
        self._pending = [0] * len(PackProgress._fields)
        self._last = time.monotonic()

    def __call__(self, progress: PackProgress) -> None:
        for position, value in enumerate(progress):
            self._pending[position] += value
        if time.monotonic() - self._last > ProgressReporter.INTERVAL_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._last = time.monotonic()
        self._callback(PackProgress(*self._pending))
        self._pending = [0] * len(self._pending)


def add_to_totals(totals: "list[Synchronized[int]]", more: PackProgress) -> None:
    for total, value in zip(totals, more, strict=True):
        with total.get_lock():
            total.value += value


class SplitProgressReporter:
    """Sum of the packers' counts by split, for the progress bar and the observer."""

    def __init__(self, reporter: ProgressReporter, observer: BuildObserver) -> None:
        self._reporter, self._observer = reporter, observer
        self._last_report = 0.0
        self._totals = dict.fromkeys(SPLITS, PackProgress())

    def add(self, split: str, more: PackProgress) -> None:
        self.set(split, PackProgress(*map(sum, zip(self._totals[split], more, strict=True))))

    def set(self, split: str, total: PackProgress) -> None:
        self._totals[split] = total
        images, size, rejects, _ = map(sum, zip(*self._totals.values(), strict=True))
        self._reporter.set(images, size, rejects)
        now = time.monotonic()
        if now - self._last_report >= ProgressReporter.INTERVAL_SECONDS:
            self._notify(now)

    def close(self) -> None:
        self._notify(time.monotonic())
        self._reporter.close()

    def _notify(self, now: float) -> None:
        self._last_report = now
        for split, total in self._totals.items():
            self._observer.images_packed(split, total)
