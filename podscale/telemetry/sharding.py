"""The Prometheus metrics of a pod that packs shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from podscale.telemetry.readings import MetricRegistry

if TYPE_CHECKING:
    from podscale.shards.watch import BuildPhase, PackProgress


SHARD_COUNTERS = ("shard_images", "shard_shards", "shard_bytes", "shard_phase_seconds")


class ShardMetrics:
    """Watches a build (see shards.watch); in `registry`.

    Rejects appear with the shard that had to leave the images out; images and bytes while it is packed.
    """

    def __init__(self, registry: CollectorRegistry, *, run: str) -> None:
        self.readings = MetricRegistry(run=run)
        self.readings.begin(*SHARD_COUNTERS)
        self.readings.before_collecting(self._book)
        self._running: tuple[BuildPhase, float] = ("other", time.perf_counter())
        self._lock = threading.Lock()
        self._packed: dict[str, PackProgress] = {}
        registry.register(self.readings)

    def phase(self, name: BuildPhase) -> None:
        self._book(name)

    def planned(self, split: str, images: int) -> None:
        self.readings.set("shard_planned_images", images, split)

    def packed(self, split: str, so_far: PackProgress) -> None:
        self._packed[split] = so_far
        self.readings.set("shard_images", so_far.images - so_far.rejects, split)
        self.readings.set("shard_bytes", sum(part.read for part in self._packed.values()), "read")
        self.readings.set("shard_bytes", sum(part.bytes for part in self._packed.values()), "written")

    def finished(self, split: str, rejects: Mapping[str, int]) -> None:
        self.readings.add("shard_shards")
        for reason, images in rejects.items():
            self.readings.add("shard_rejects", images, reason)

    def _book(self, name: BuildPhase | None = None) -> None:
        """Books the time so far on the running phase, and goes on with `name`, or the same one."""
        with self._lock:
            now = time.perf_counter()
            phase, since = self._running
            self.readings.add("shard_phase_seconds", now - since, phase)
            self._running = (name or phase, now)
