"""Gauges that are read at each collection of the metrics: memory, queue depth, checkpoint interval.

They run once a second outside the training thread and never wait for the device: device memory is what the allocator
has reserved, everything else is host data.
"""

import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from podscale.config import RunConfig
from podscale.data.loaders.base import Loader
from podscale.distributed.rank_group import World
from podscale.hardware import find_gpu_chip
from podscale.telemetry.metrics import TrainMetrics


@dataclass(frozen=True)
class Gauges:
    """Register the gauges of one rank when called with the rank's metrics.

    Args:
        flops_per_image: FLOPs of the model for one image, forward and backward.
        steps_between_saves: steps between two checkpoints; 0 if there are none.
        device_memory: returns bytes by kind.
    """

    config: RunConfig
    world: World
    loader: Loader
    flops_per_image: float
    steps_between_saves: float
    device_memory: Callable[[], dict[str, int]]

    def __call__(self, metrics: TrainMetrics) -> None:
        peak = peak_flops(self.world.device_name, self.config.train.precision)
        metrics.set_flops(self.flops_per_image, peak * len(self.world.ranks))
        sources = [self._memory, self._queue]
        if self.world.is_rank0:
            claimed = self.config.claim.images_per_second
            if claimed is not None:
                metrics.values.set("train_target_images_per_second", claimed)
            if self.steps_between_saves:
                sources.append(self._checkpoint_interval)
        for source in sources:
            metrics.values.on_collect(source(metrics))

    def _memory(self, metrics: TrainMetrics) -> Callable[[], None]:
        def read() -> None:
            cached = {f"cached_{name}": size for name, size in self.loader.cached_bytes.items() if size}
            for kind, size in {**host_memory(), **cached, **self.device_memory()}.items():
                metrics.values.set("train_memory_bytes", size, kind)

        return read

    def _queue(self, metrics: TrainMetrics) -> Callable[[], None]:
        def read() -> None:
            ready = self.loader.queued_batches
            if ready is not None:
                metrics.values.set("train_data_queue_depth", ready)

        return read

    def _checkpoint_interval(self, metrics: TrainMetrics) -> Callable[[], None]:
        """Estimate from the mean step time up to the newest step, so that a hang does not lengthen the interval."""
        started, last_steps = perf_counter(), 0.0

        def read() -> None:
            nonlocal last_steps
            steps = metrics.values.get("train_steps")
            if steps > last_steps:
                last_steps, step_seconds = steps, (perf_counter() - started) / steps
                metrics.values.set("train_checkpoint_interval_seconds", self.steps_between_saves * step_seconds)

        return read


def peak_flops(device: str, precision: str) -> float:
    """Return the peak dense FLOP/s of a device by its driver's name; 0 if the device is unknown."""
    chip = find_gpu_chip(device)
    return chip.peak_tflops(precision) * 1e12 if chip is not None else 0.0


def host_memory() -> dict[str, int]:
    """Return the bytes of this process by kind; empty if they cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return {"resident": pages * resource.getpagesize()}
    return {}
