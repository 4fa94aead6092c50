"""Gauges that are read at each collection of the metrics: memory, queue depth, checkpoint interval.

They run once a second outside the training thread and never wait for the device: device memory is what the allocator
has reserved, everything else is host data.
"""

import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter

from podscale.config.run import CheckpointSection
from podscale.data.loaders.base import Loader
from podscale.distributed.rank_group import World
from podscale.hardware import find_gpu_chip
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.registry import MetricRegistry
from podscale.training.step_plan import StepPlan


def add_gauges(
    metrics: TrainMetrics,
    plan: StepPlan,
    world: World,
    loader: Loader,
    flops_per_image: float,
    device_memory: Callable[[], dict[str, int]],
) -> None:
    """Add the gauges of one rank.

    Args:
        flops_per_image: FLOPs of the model for one image, forward and backward.
        device_memory: Returns the bytes of this rank's devices by kind.
    """
    values = metrics.values

    def read_memory() -> None:
        cached = {f"cached_{name}": size for name, size in loader.cached_bytes.items() if size}
        for kind, size in {**host_memory(), **cached, **device_memory()}.items():
            values.set("train_memory_bytes", size, kind)

    def read_queue() -> None:
        if (queued := loader.queued_batches) is not None:
            values.set("train_data_queue_depth", queued)

    def read_refusals() -> None:
        for reason, images in loader.native_refusals.items():
            values.set("train_native_refusals", images, reason)

    metrics.set_flops(flops_per_image, peak_flops(world.device_name, plan.config.train.precision) * len(world.ranks))
    values.on_collect(read_memory)
    values.on_collect(read_queue)
    values.on_collect(read_refusals)
    if world.is_rank0:
        if (claimed := plan.config.claim.images_per_second) is not None:
            values.set("train_target_images_per_second", claimed)
        settings = plan.config.checkpoint
        if settings.every_steps or settings.every_epochs:
            values.on_collect(_checkpoint_interval(values, settings, plan.training_images / world.size))


def _checkpoint_interval(
    values: MetricRegistry, settings: CheckpointSection, images_per_epoch: float
) -> Callable[[], None]:
    """Return the reader of the interval. It uses the mean time of finished steps, so a hang does not lengthen it.

    Args:
        images_per_epoch: images of this rank in an epoch.
    """
    started, last_steps = perf_counter(), 0.0

    def read() -> None:
        nonlocal last_steps
        steps, images = values.get("train_steps"), values.get("train_images")
        if steps > last_steps and images > 0:
            last_steps, seconds = steps, perf_counter() - started
            by_steps = settings.every_steps * seconds / steps
            by_epochs = settings.every_epochs * seconds * images_per_epoch / images
            values.set("train_checkpoint_interval_seconds", min(filter(None, (by_steps, by_epochs))))

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
