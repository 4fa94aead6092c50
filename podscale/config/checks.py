"""Checks across the sections of a run document; they need no file, device or cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from podscale.config.model import RunConfig

SMALLEST_IMAGENET_STEM = 32  # five halvings: below this the last stage of the network would see less than one pixel
SMALLEST_ALEXNET = 63  # below this pool5 would see less than one of its windows


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
    check_step(config)
    schedule = train.schedule
    if schedule.warmup_epochs >= train.epochs:
        raise conflict(
            "train.schedule.warmup_epochs",
            f"a warm-up of {schedule.warmup_epochs} epochs does not end within the run of {train.epochs} epochs",
        )
    if train.optimizer.nesterov and train.optimizer.momentum == 0:
        raise conflict("train.optimizer.nesterov", "Nesterov's form needs train.optimizer.momentum above 0")
    smallest = min(config.input.image_size, config.eval_image_size)
    if model.name == "alexnet":
        check_alexnet(config, smallest)
    elif model.stem == "imagenet" and smallest < SMALLEST_IMAGENET_STEM:
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


def check_step(config: RunConfig) -> None:
    """Raises where the ways to carry out an update exclude each other."""
    train = config.train
    if train.cuda_graph and train.all_reduce.algorithm == "ddp":
        raise conflict(
            "train.cuda_graph",
            "torch's DistributedDataParallel cannot be part of a CUDA graph of the whole update; set "
            "train.all_reduce.algorithm to one of ours, or train.cuda_graph=false",
        )
    if train.cuda_graph and train.compile in ("reduce-overhead", "max-autotune"):
        raise conflict(
            "train.compile",
            f"train.compile={train.compile} records CUDA graphs of its own, which cannot be recorded again; set "
            "train.compile to default or max-autotune-no-cudagraphs, or train.cuda_graph=false",
        )
    if train.stem_compute == "space_to_depth" and config.model.stem == "small":
        raise conflict("train.stem_compute", "the small stem has no stride to fold into channels; set it to plain")


def check_alexnet(config: RunConfig, smallest: int) -> None:
    """Raises where the document asks of AlexNet what it does not have."""
    if config.model.stem != "imagenet":
        raise conflict("model.stem", f"alexnet has no {config.model.stem} stem: set model.stem=imagenet, or a resnet")
    if smallest < SMALLEST_ALEXNET:
        raise conflict(
            "input.image_size",
            f"images of {smallest} px are too small for alexnet (at least {SMALLEST_ALEXNET}); "
            "raise input.image_size and evaluate.image_size, or take a resnet",
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
