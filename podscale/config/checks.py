"""Checks across the sections of a run document; they need no file, device or cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from podscale.config.model import RunConfig, TrainSection

SMALLEST_IMAGENET_STEM = 32  # five halvings: below this the last stage of the network would see less than one pixel


def conflict(key: str, message: str) -> PydanticCustomError:
    """An error of a cross-section check; `key` is the dotted field a person should change first."""
    return PydanticCustomError("conflict", "{message}", {"key": key, "message": message})


def check_sections(config: RunConfig) -> None:
    """Raises where two fields, each valid alone, cannot both hold."""
    train, launch, model = config.train, config.launch, config.model
    ranks = launch.processes * launch.nodes if launch.processes else None
    if ranks is not None:
        check_ranks(config, ranks)
    elif train.global_batch % train.accumulation:
        raise conflict(
            "train.global_batch",
            f"train.global_batch {train.global_batch} is not divisible by train.accumulation {train.accumulation}",
        )
    schedule = train.schedule
    if schedule.warmup_epochs >= train.epochs:
        raise conflict(
            "train.schedule.warmup_epochs",
            f"a warm-up of {schedule.warmup_epochs} epochs does not end within the run of {train.epochs} epochs",
        )
    check_update(train)
    smallest = min(config.input.image_size, config.eval_image_size)
    if model.stem == "imagenet" and smallest < SMALLEST_IMAGENET_STEM:
        raise conflict(
            "model.stem",
            f"images of {smallest} px are too small for the imagenet stem (at least {SMALLEST_IMAGENET_STEM}); "
            "use model.stem=small",
        )
    if config.input.order == "global" and config.input.groups != 1:
        raise conflict("input.groups", "groups belong to the blocked order; set input.order=blocked or groups=1")
    if config.input.order == "blocked" and train.global_batch % config.input.groups:
        raise conflict(
            "input.groups",
            f"train.global_batch {train.global_batch} is not divisible by input.groups {config.input.groups}",
        )


def check_update(train: TrainSection) -> None:
    """Raises where optimizer, precision and the way of updating do not go together."""
    optimizer = train.optimizer
    if optimizer.nesterov and optimizer.momentum == 0:
        raise conflict("train.optimizer.nesterov", "Nesterov's form needs train.optimizer.momentum above 0")
    if optimizer.name == "lamb" and (optimizer.nesterov or optimizer.momentum_form):
        key = "nesterov" if optimizer.nesterov else "momentum_form"
        raise conflict(f"train.optimizer.{key}", f"LAMB has no {key}; that is an option of sgd and lars: leave it out")
    if train.precision == "fp16" and train.loss_scale <= 1:
        raise conflict(
            "train.loss_scale",
            f"fp16 without loss scaling loses small gradients, and train.loss_scale is {train.loss_scale:g}; leave it "
            "at 65536, which adapts by itself, or use bf16, which needs none",
        )
    if train.weight_gather == "bf16" and train.weight_update != "sharded":
        raise conflict(
            "train.weight_gather", "only a sharded update gathers weights; set train.weight_update=sharded or fp32"
        )
    if train.all_reduce.algorithm == "ddp" and (train.weight_update == "sharded" or train.precision == "bf16-pure"):
        raise conflict(
            "train.all_reduce.algorithm",
            "ddp, the baseline, reduces whole fp32 gradients: it goes with train.weight_update=replicated and with "
            "fp32, bf16 or fp16; choose another algorithm",
        )


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Raises where the document does not fit a world of `ranks` processes; called again once that number is known."""
    train = config.train
    parts = ranks * train.accumulation
    if train.global_batch % parts:
        raise conflict(
            "train.global_batch",
            f"train.global_batch {train.global_batch} is not divisible by ranks x accumulation = "
            f"{ranks} x {train.accumulation}",
        )
    group = config.model.batch_norm.group
    if ranks % group:
        raise conflict(
            "model.batch_norm.group", f"batch-norm groups of {group} ranks do not divide the {ranks} ranks of the run"
        )
    row = train.all_reduce.row
    if row is not None and ranks % row:
        raise conflict("train.all_reduce.row", f"rows of {row} ranks do not divide the {ranks} ranks of the run")
