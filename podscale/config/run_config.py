"""Run document with its recipe filled in and its sections checked against each other.

The checks need no files, devices or cluster. `train_checks` and `engine_support` have those of one section, `ranks`
those of the number of devices.
"""

from typing import Any

from pydantic import model_validator

from podscale.config.batch_phases import batch_phases, check_each_batch
from podscale.config.data import InputSection
from podscale.config.engine_support import check_engine_support, check_model, requests_tpus
from podscale.config.ensemble import check_ensemble, fill_cycles
from podscale.config.fields import conflict_error
from podscale.config.ranks import check_batch_divisible, check_batch_norm_span, check_device_count
from podscale.config.recipes import fill_recipe
from podscale.config.run import RunDocument
from podscale.config.train_checks import (
    check_batch_norm_momentum,
    check_fine_tuning,
    check_numerics,
    check_optimizer,
    check_phases,
    check_weight_update,
)


class RunConfig(RunDocument):
    """One run, from images to report."""

    @model_validator(mode="before")
    @classmethod
    def _fill_open_options(cls, values: Any) -> Any:
        return fill_cycles(fill_recipe(values))

    @model_validator(mode="after")
    def _check_sections(self) -> "RunConfig":
        check_sections(self)
        return self


def check_sections(config: RunDocument) -> None:
    """Raise if two fields, each valid alone, conflict."""
    train = config.train
    check_engine_support(config)
    check_phases(train)
    check_batch(config)
    check_step_options(config)
    check_partitions(config)
    check_each_batch(config, check_batch_norm_span)
    check_optimizer(train)
    check_numerics(train)
    check_weight_update(train)
    check_batch_norm_momentum(train)
    check_ensemble(config.ensemble, train.epochs, config.checkpoint.snapshots)
    check_fine_tuning(train)
    check_evaluation(config)
    check_model(config)
    check_input(config)


def check_batch(config: RunDocument) -> None:
    """Raise if a global batch does not divide into the ranks or processes that the document sets."""
    processes = config.launch.processes * config.launch.nodes
    if not processes or requests_tpus(config):
        check_each_batch(config, check_batch_divisible)
    elif config.train.engine == "pytorch":
        check_each_batch(config, lambda each: check_device_count(each, processes))
    else:
        check_each_batch(config, lambda each: check_batch_divisible(each, processes, "processes"))


def check_step_options(config: RunDocument) -> None:
    """Raise if options of the training step exclude each other."""
    train = config.train
    if train.stem_compute == "space_to_depth" and config.model.small_stem:
        problem = "the small stem has no stride to fold into channels"
        raise conflict_error("train.stem_compute", problem, hint="Set it to plain.")
    if not train.cuda_graph:
        return
    if train.compile in ("reduce-overhead", "max-autotune"):
        raise conflict_error(
            "train.compile",
            "it records CUDA graphs of its own, which train.cuda_graph cannot record again",
            got=train.compile,
            hint="Set it to default or max-autotune-no-cudagraphs, or train.cuda_graph=false.",
        )
    problem, remedy = "", ""
    if train.all_reduce.algorithm == "ddp":
        problem = "torch's DistributedDataParallel cannot be part of a CUDA graph of the whole step"
        remedy = ", or train.all_reduce.algorithm to another one"
    elif train.optimizer.is_plugin:
        problem = "a CUDA graph replays one step for all, and a plug-in may change its work between steps"
    elif train.optimizer.name == "shampoo":
        problem = "a CUDA graph replays one step for all, and only some steps of Shampoo take inverse roots"
    if problem:
        raise conflict_error("train.cuda_graph", problem, hint=f"Set train.cuda_graph=false{remedy}.")


def check_partitions(config: RunDocument) -> None:
    """Raise if images cannot be cut into the parts of train.spatial_partitions."""
    parts, side = config.train.spatial_partitions, config.input.image_size
    if any(side % part for part in parts):
        raise conflict_error(
            "train.spatial_partitions",
            f"images of {side} px cannot be cut into {parts[0]} x {parts[1]} equal parts",
            got=parts,
            hint="Choose divisors of input.image_size.",
        )


def check_evaluation(config: RunDocument) -> None:
    """Raise if the evaluation needs models, weights, epochs or a target that the run does not have."""
    check_evaluation_offset(config)
    if len(config.evaluate.models) == 1:
        raise conflict_error(
            "evaluate.models",
            "an ensemble of one is a single model",
            hint="Name two or more, or evaluate it as its own run.",
        )
    if config.evaluate.weights == "ema" and config.train.ema.decay is None:
        raise conflict_error(
            "evaluate.weights",
            "no running average of the weights is kept",
            got="ema",
            hint="Set train.ema.decay, such as 0.9999.",
        )
    if config.telemetry.mlperf_log and config.train.target_top1 is None:
        raise conflict_error(
            "telemetry.mlperf_log",
            "MLPerf times a run to a target accuracy",
            hint="Set train.target_top1 (0.759 for ResNet-50 on ImageNet).",
        )


def check_evaluation_offset(config: RunDocument) -> None:
    """Raise if the first evaluation would come after the end of the run, or if only the end is evaluated."""
    section, epochs = config.evaluate, config.train.epochs
    if section.offset > epochs:
        raise conflict_error(
            "evaluate.offset",
            f"the run ends after {epochs:g} epochs, before the first evaluation",
            got=section.offset,
            hint="Lower it, or set evaluate.every_epochs=0 and leave it out to evaluate only at the end.",
        )
    if section.offset and not section.every_epochs:
        raise conflict_error(
            "evaluate.offset",
            "evaluate.every_epochs=0 evaluates only at the end",
            got=section.offset,
            hint="Set evaluate.every_epochs above 0, or leave it out.",
        )


def check_input(config: RunDocument) -> None:
    """Raise if the loader or the order of the samples does not support another input option."""
    section = config.input
    _check_cache_form(section)
    if section.loader in ("dali", "nvjpeg"):
        if section.decoded_cache_bytes:
            raise conflict_error(
                "input.decoded_cache_bytes",
                f"input.loader={section.loader} keeps no decoded images",
                got=section.decoded_cache_bytes,
                hint="Set input.loader=native or reference, or input.decoded_cache_bytes=0.",
            )
        if section.augment.is_enabled:
            raise conflict_error(
                "input.loader",
                "it only crops and flips, and input.augment needs more",
                got=section.loader,
                hint="Set input.loader=native or reference, or leave input.augment out.",
            )
        if section.interpolation == "random":
            raise conflict_error(
                "input.loader",
                "it resizes all crops with one filter, and input.interpolation=random needs two",
                got=section.loader,
                hint="Set input.loader=native or reference, or input.interpolation=bicubic.",
            )
    _check_padding(config)
    _check_standardization(section)
    if section.order == "global" and section.groups != 1:
        hint = "Set that, or input.groups=1."
        raise conflict_error("input.groups", "needs input.order=blocked", got=section.groups, hint=hint)
    for phase in batch_phases(config.train):
        if section.order == "blocked" and phase.global_batch % section.groups:
            problem = f"does not divide {phase.batch_option} {phase.global_batch}"
            raise conflict_error("input.groups", problem, got=section.groups)


def _check_cache_form(section: InputSection) -> None:
    """Raise if the form of the decoded cache is set without a cache or a loader that has it."""
    form = section.decoded_cache_form
    if form != "auto" and not section.decoded_cache_bytes:
        raise conflict_error(
            "input.decoded_cache_form",
            "there is no decoded cache, because input.decoded_cache_bytes is 0",
            got=form,
            hint="Set input.decoded_cache_bytes, or leave input.decoded_cache_form out.",
        )
    if form == "coefficients" and section.loader not in ("auto", "native"):
        raise conflict_error(
            "input.decoded_cache_form",
            f"input.loader={section.loader} keeps no coefficients",
            got=form,
            hint="Set input.loader=native, or input.decoded_cache_form=pixels.",
        )


def _check_padding(config: RunDocument) -> None:
    """Raise if a random crop may hold nothing but padding."""
    crops = {"input.crop": config.input.crop}
    crops |= {f"train.phases.{i}.crop": phase.crop for i, phase in enumerate(config.train.phases) if phase.crop}
    side = min(config.training_sizes)
    for key, crop in crops.items():
        if crop.padding is not None and crop.padding >= side:
            raise conflict_error(
                f"{key}.padding",
                f"not less than the side of the images, {side} px: some crops would hold nothing else",
                got=crop.padding,
                hint="Lower it; 4 is usual for images of 32 px.",
            )


def _check_standardization(section: InputSection) -> None:
    """Raise if constants of the data set are set that per-image standardisation does not use."""
    if not section.per_image_standardization:
        return
    names = ["std"] if section.augment.is_enabled else ["mean", "std"]  # augmentation fills with the mean colour
    for name in names:
        value = getattr(section, name)
        if value != InputSection.model_fields[name].default:
            raise conflict_error(
                f"input.{name}",
                "input.per_image_standardization takes mean and deviation from each image",
                got=value,
                hint=f"Leave out input.{name}, or input.per_image_standardization.",
            )
