"""Choice of the kernels of batch norm and 1x1 convolutions for `train.fused_kernels: auto`.

Forward and backward of the run's own network are timed on the device with each kind of kernels, after the passes that
compile them. Every time is the slowest rank's. The choice is stored (see `stored_choice`).
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import distributed as dist

from podscale.config import RunConfig
from podscale.config.batch_phases import largest_pass
from podscale.distributed.waits import waiting_for
from podscale.pytorch.batch_norm.layer import BatchNorm, batch_norm_layers
from podscale.pytorch.precision import build_precision, set_numerics
from podscale.pytorch.stored_choice import StoredChoice
from podscale.pytorch.timing import median_seconds
from podscale.pytorch.train_step import smoothed_cross_entropy
from podscale.pytorch.trainer import build_model_on_device
from podscale.pytorch.world import World
from podscale.util.kernel_errors import triton_errors

Kernels = Literal["off", "norm", "gemm"]
KINDS: tuple[Kernels, ...] = get_args(Kernels)
WARMUPS, REPEATS = 3, 10
LEAST_GAIN = 0.02
"""Share of the time by which kernels of this project must be faster than the libraries' to be chosen."""


def resolve_fused_kernels(config: RunConfig, world: World, classes: int, stored: StoredChoice) -> RunConfig:
    """Return the document with `fused_kernels: auto` replaced by a choice. Every rank must call this at the same time.

    It is `off` without a measurement where the kernels do not run: on CPUs, in NCHW order and with `train.compile`.
    """
    train = config.train
    if train.fused_kernels != "auto":
        return config
    chosen: Kernels = "off"
    if world.on_gpu and train.channels_last and train.compile == "off":
        chosen, seconds, is_kept = choose_kernels(config, world, classes, stored)
        times = {f"{kind}_ms": f"{1000 * time:.4g}" for kind, time in seconds.items()}
        stored.report({"kernels": chosen, **times}, kept=is_kept)
    return with_kernels(config, chosen)


def with_kernels(config: RunConfig, kind: Kernels) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"fused_kernels": kind})})


@waiting_for("the choice of kernels")
def choose_kernels(
    config: RunConfig, world: World, classes: int, stored: StoredChoice
) -> tuple[Kernels, dict[Kernels, float], bool]:
    """Return the choice, seconds of a pass by kind, and whether both were stored for the same ranks and devices.

    Every rank must call this at the same time. A kind that does not run on every rank has no time.
    """

    def measure() -> dict[str, Any]:
        times = [time_kernels(config, world, classes, kind) for kind in KINDS]
        slowest = torch.tensor(times, dtype=torch.float64, device=world.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds = {kind: time for kind, time in zip(KINDS, slowest.tolist(), strict=True) if math.isfinite(time)}
        return {"chosen": fastest_kernels(seconds), "seconds": seconds}

    device = torch.cuda.get_device_name(world.device) if world.on_gpu else "cpu"
    key = [world.size, device, _images_shape(config, world), config.train.precision, config.model.model_dump()]
    record, is_kept = stored.keep(world, key, measure)
    return record["chosen"], record["seconds"], is_kept


def fastest_kernels(seconds: dict[Kernels, float]) -> Kernels:
    """Return the fastest kind; a later one of KINDS must be faster by LEAST_GAIN than those before it."""
    chosen: Kernels = "off"
    for kind in KINDS:
        if seconds.get(kind, math.inf) < seconds.get(chosen, math.inf) * (1 - LEAST_GAIN):
            chosen = kind
    return chosen


def _images_shape(config: RunConfig, world: World) -> list[int]:
    """Return the shape of a rank's images in the largest pass of the run."""
    side = max(config.training_sizes)
    return [largest_pass(config.train).pass_images // world.size, 3, side, side]


def time_kernels(config: RunConfig, world: World, classes: int, kind: Kernels) -> float:
    """Return the median seconds of forward and backward on this rank; infinity if the kernels do not run here.

    Batch norm takes the statistics of this rank alone, so that no rank waits for another.
    """
    try:
        return _median_pass(with_kernels(config, kind), world, classes, kind)
    except torch.OutOfMemoryError:
        return math.inf
    except triton_errors():
        return math.inf
    finally:
        if world.on_gpu:
            torch.cuda.empty_cache()


def _median_pass(config: RunConfig, world: World, classes: int, kind: Kernels) -> float:
    set_numerics(config.train)
    model = build_model_on_device(config, world, classes)
    if kind != "off" and not any(_runs(layer, kind) for layer in batch_norm_layers(model)):
        return math.inf
    run = _training_pass(config, world, model)
    return median_seconds(run, world.device, warmups=WARMUPS, repeats=REPEATS)


def _runs(layer: BatchNorm, kind: Kernels) -> bool:
    return layer.folds_convolutions if kind == "gemm" else layer.is_fused


def _training_pass(config: RunConfig, world: World, model: torch.nn.Module) -> Callable[[], None]:
    """Return a function that runs forward and backward on random images, as large as those of a step."""
    shape = _images_shape(config, world)
    precision = build_precision(config.train, world)
    precision.cast_parameters(model)
    images = torch.randn(shape, device=world.device).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(shape[0], dtype=torch.int64, device=world.device)

    def run() -> None:
        with precision.autocast():
            outputs = model(images)
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        smoothed_cross_entropy(logits, labels, config.train.label_smoothing).backward()
        model.zero_grad(set_to_none=True)

    return run
