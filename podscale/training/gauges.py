"""What the metrics of a training look up by themselves, once a second and off the training thread.

Nothing here waits for the device: memory is what its allocator has booked, and the rest is the host's.
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
    """Sets up the meters of one rank; call it with the rank's metrics.

    flops_per_image: of the model for one image, forward and backward. steps_between_saves: updates between two
    checkpoints, 0 where there are none. device_memory: bytes by kind.
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
        """By the pace up to the newest update: a run that hangs is not said to have a longer interval."""
        started, known = perf_counter(), 0.0

        def read() -> None:
            nonlocal known
            steps = metrics.values.get("train_steps")
            if steps > known:
                known, pace = steps, (perf_counter() - started) / steps
                metrics.values.set("train_checkpoint_interval_seconds", self.steps_between_saves * pace)

        return read


def peak_flops(device: str, precision: str) -> float:
    """Floating-point operations a second of a device by its driver's name, dense; 0 where the table has none."""
    chip = find_gpu_chip(device)
    return chip.peak_tflops(precision) * 1e12 if chip is not None else 0.0


def host_memory() -> dict[str, int]:
    """Bytes of this process by kind; nothing where that cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return {"resident": pages * resource.getpagesize()}
    return {}
