"""Choice of the kernels of batch norm and 1x1 convolutions for `train.fused_kernels: auto`.

Forward and backward of the run's own network are timed on the device with each kind of kernels, after the passes that
compile them. Every time is the slowest rank's. The choice is stored in the run directory and reused if the run resumes
on the same kind of device: other kernels round otherwise, and the resumed run would not be bit-identical to an
uninterrupted one.
"""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import torch
from torch import distributed as dist

from podscale.config import RunConfig
from podscale.distributed.waits import waiting_for
from podscale.pytorch.batch_norm.layer import BatchNorm, batch_norm_layers
from podscale.pytorch.precision import build_precision, set_numerics
from podscale.pytorch.timing import record_mark, seconds_between
from podscale.pytorch.train_step import smoothed_cross_entropy
from podscale.pytorch.trainer import build_model_on_device
from podscale.pytorch.world import World
from podscale.util.files import write_json

Kernels = Literal["off", "norm", "gemm"]
KINDS: tuple[Kernels, ...] = get_args(Kernels)
WARMUPS, REPEATS = 3, 10
LEAST_GAIN = 0.02
"""Share of the time by which kernels of this project must be faster than the libraries' to be chosen."""


def resolve_fused_kernels(
    config: RunConfig,
    world: World,
    classes: int,
    choice_file: Path,
    fence: Callable[[], None] | None,
    report: Callable[..., None],
) -> RunConfig:
    """Return the document with `fused_kernels: auto` replaced by a choice. Every rank must call this at the same time.

    It is `off` without a measurement where the kernels do not run: on CPUs, in NCHW order and with `train.compile`.

    Args:
        fence: called on rank 0 before it reads and writes `choice_file`.
        report: called on every rank with the facts; `kept` is True if an earlier launch made the choice.
    """
    train = config.train
    if train.fused_kernels != "auto":
        return config
    chosen: Kernels = "off"
    if world.on_gpu and train.channels_last and train.compile == "off":
        if world.is_rank0 and fence is not None:
            fence()
        chosen, seconds, is_kept = choose_kernels(config, world, classes, choice_file)
        times = {f"{kind}_ms": f"{1000 * time:.4g}" for kind, time in seconds.items()}
        report({"kernels": chosen, **times}, kept=is_kept)
    return with_kernels(config, chosen)


def with_kernels(config: RunConfig, kind: Kernels) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"fused_kernels": kind})})


@waiting_for("the choice of kernels")
def choose_kernels(
    config: RunConfig, world: World, classes: int, choice_file: Path
) -> tuple[Kernels, dict[Kernels, float], bool]:
    """Return the choice, seconds of a pass by kind, and whether `choice_file` had them for the same ranks and devices.

    Every rank must call this at the same time. A kind that does not run on every rank has no time.
    """
    device = torch.cuda.get_device_name(world.device) if world.on_gpu else "cpu"
    batch = rank_batch(config, world)
    key = [world.size, device, batch, config.input.image_size, config.train.precision, config.model.model_dump()]
    record = world.broadcast(_read_choice(choice_file, key) if world.is_rank0 else None)
    is_kept = record is not None
    if record is None:
        slowest = torch.tensor(
            [time_kernels(config, world, classes, kind) for kind in KINDS], dtype=torch.float64, device=world.device
        )
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds = {kind: time for kind, time in zip(KINDS, slowest.tolist(), strict=True) if math.isfinite(time)}
        record = world.broadcast({"key": key, "chosen": fastest_kernels(seconds), "seconds": seconds})
        if world.is_rank0:
            choice_file.parent.mkdir(parents=True, exist_ok=True)
            write_json(choice_file, record)
    return record["chosen"], record["seconds"], is_kept


def fastest_kernels(seconds: dict[Kernels, float]) -> Kernels:
    """Return the fastest kind; a later one of KINDS must be faster by LEAST_GAIN than those before it."""
    chosen: Kernels = "off"
    for kind in KINDS:
        if seconds.get(kind, math.inf) < seconds.get(chosen, math.inf) * (1 - LEAST_GAIN):
            chosen = kind
    return chosen


def rank_batch(config: RunConfig, world: World) -> int:
    """Return the images of a rank in one pass of the first step."""
    return max(1, config.train.global_batch // (world.size * config.train.accumulation))


def time_kernels(config: RunConfig, world: World, classes: int, kind: Kernels) -> float:
    """Return the median seconds of forward and backward on this rank; infinity if the kernels do not run here.

    Batch norm takes the statistics of this rank alone, so that no rank waits for another.
    """
    try:
        return _median_pass(with_kernels(config, kind), world, classes, kind)
    except torch.OutOfMemoryError:
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
    for _ in range(WARMUPS):
        run()
    marks = [record_mark(on_gpu=world.on_gpu)]
    for _ in range(REPEATS):
        run()
        marks.append(record_mark(on_gpu=world.on_gpu))
    if world.on_gpu:
        torch.cuda.synchronize(world.device)
    return median(seconds_between(begin, end) for begin, end in pairwise(marks))


def _runs(layer: BatchNorm, kind: Kernels) -> bool:
    return layer.folds_convolutions if kind == "gemm" else layer.is_fused


def _training_pass(config: RunConfig, world: World, model: torch.nn.Module) -> Callable[[], None]:
    """Return a function that runs forward and backward on random images, as large as those of a step."""
    batch, side = rank_batch(config, world), config.input.image_size
    precision = build_precision(config.train, world)
    precision.cast_parameters(model)
    images = torch.randn(batch, 3, side, side, device=world.device).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(batch, dtype=torch.int64, device=world.device)

    def run() -> None:
        with precision.autocast():
            outputs = model(images)
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        smoothed_cross_entropy(logits, labels, config.train.label_smoothing).backward()
        model.zero_grad(set_to_none=True)

    return run


def _read_choice(path: Path, key: list[Any]) -> dict[str, Any] | None:
    """Read the choice of an earlier launch for the same ranks and devices; None if there is none."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if record.get("key") == json.loads(json.dumps(key)) else None
