"""The Prometheus metrics of a pod that packs shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from podscale.telemetry.readings import MetricRegistry

if TYPE_CHECKING:
    from podscale.data.sharding.pack_progress import BuildPhase, PackProgress


SHARD_COUNTERS = ("shard_images", "shard_shards", "shard_bytes", "shard_phase_seconds")


class ShardMetrics:
    """Watches a build (see shards.watch); in `registry`.

    Rejects appear with the shard that had to leave the images out; images and bytes while it is packed.
    """

    def __init__(self, registry: CollectorRegistry, *, run: str) -> None:
        self.values = MetricRegistry(run=run)
        self.values.declare(*SHARD_COUNTERS)
        self.values.on_collect(self._add_phase_seconds)
        self._running: tuple[BuildPhase, float] = ("other", time.perf_counter())
        self._lock = threading.Lock()
        self._packed: dict[str, PackProgress] = {}
        registry.register(self.values)

    def phase_started(self, name: BuildPhase) -> None:
        self._add_phase_seconds(name)

    def images_planned(self, split: str, images: int) -> None:
        self.values.set("shard_planned_images", images, split)

    def images_packed(self, split: str, so_far: PackProgress) -> None:
        self._packed[split] = so_far
        self.values.set("shard_images", so_far.images - so_far.rejects, split)
        self.values.set("shard_bytes", sum(part.bytes_read for part in self._packed.values()), "read")
        self.values.set("shard_bytes", sum(part.bytes_written for part in self._packed.values()), "written")

    def shard_finished(self, split: str, rejects: Mapping[str, int]) -> None:
        self.values.add("shard_shards")
        for reason, images in rejects.items():
            self.values.add("shard_rejects", images, reason)

    def _add_phase_seconds(self, name: BuildPhase | None = None) -> None:
        """Books the time so far on the running phase, and goes on with `name`, or the same one."""
        with self._lock:
            now = time.perf_counter()
            phase, since = self._running
            self.values.add("shard_phase_seconds", now - since, phase)
            self._running = (name or phase, now)
