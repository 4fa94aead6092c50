"""Checks across the sections of a run document; they need no file, device or cluster."""

from itertools import pairwise

from pydantic_core import PydanticCustomError

from podscale.config.architecture import check_network
from podscale.config.conflict import conflict
from podscale.config.engines import check_engine, wants_tpus
from podscale.config.ensemble import check_ensemble
from podscale.config.optimizer import check_options, rules_with
from podscale.config.run import RunDocument
from podscale.config.spans import batch_norm_span, check_span, sharers
from podscale.config.train import TrainSection
from podscale.text import listed


def check_sections(config: RunDocument) -> None:
    """Raises where two fields, each valid alone, cannot both hold."""
    train, launch = config.train, config.launch
    check_engine(config)
    processes = launch.processes * launch.nodes if launch.processes else None
    if processes is None or wants_tpus(config):
        if train.global_batch % train.accumulation:
            raise conflict(
                "train.global_batch",
                f"train.global_batch {train.global_batch} is not divisible by train.accumulation {train.accumulation}",
            )
    elif train.engine == "pytorch":
        check_ranks(config, processes)
    else:
        check_processes(config, processes)
    check_step(config)
    check_partitions(config)
    check_span(config)
    check_phases(train)
    check_update(train)
    check_ensemble(config.ensemble, train.epochs, config.checkpoint.snapshots)
    if train.start_from.epoch is not None and train.start_from.run is None:
        raise conflict("train.start_from.epoch", "of which run? set train.start_from.run too")
    if len(config.evaluate.models) == 1:
        raise conflict(
            "evaluate.models", "an ensemble of one is a single model: name two or more, or evaluate it as its own run"
        )
    if config.evaluate.weights == "ema" and train.ema.decay is None:
        raise conflict(
            "evaluate.weights", "no running average of the weights is kept; set train.ema.decay, such as 0.9999"
        )
    if config.telemetry.mlperf_log and train.target_top1 is None:
        raise conflict(
            "telemetry.mlperf_log",
            "MLPerf times a run to a target accuracy; set train.target_top1 (0.759 for ResNet-50 on ImageNet)",
        )
    check_network(config)
    if config.input.decoded_cache_bytes and config.input.loader in ("dali", "nvjpeg"):
        raise conflict(
            "input.decoded_cache_bytes",
            f"{config.input.loader} keeps no decoded images; set input.loader=torchvision, or decoded_cache_bytes=0",
        )
    if config.input.augment.wanted and config.input.loader in ("dali", "nvjpeg"):
        raise conflict(
            "input.loader",
            f"{config.input.loader} crops and mirrors alone, and input.augment asks for more; set "
            "input.loader=torchvision, or leave input.augment out",
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
    check_options(optimizer)
    check_momentum(train)
    if optimizer.name == "neumann":
        check_neumann(train)
    if optimizer.nesterov and optimizer.momentum == 0:
        raise conflict("train.optimizer.nesterov", "Nesterov's form needs train.optimizer.momentum above 0")
    if optimizer.name in ("adam", "rmsprop") and optimizer.added_eps == 0:
        raise conflict(
            "train.optimizer.eps",
            f"{optimizer.name} divides by the root of an average that may be 0; set "
            "train.optimizer.eps above 0, or leave it out",
        )
    if optimizer.name == "shampoo" and train.weight_update == "sharded":
        raise conflict(
            "train.weight_update",
            "Shampoo's statistics are of whole blocks of the gradient, and a sharded update leaves each rank parts "
            "of them; set train.weight_update=replicated: statistics and their roots are spread over the ranks anyway",
        )
    if train.binary_threshold is not None and train.loss != "binary_cross_entropy":
        raise conflict(
            "train.binary_threshold",
            "only binary cross entropy has a threshold; set train.loss=binary_cross_entropy, or leave it out",
        )
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
    if train.weight_update == "sharded" and train.all_reduce.algorithm in ("tree", "hierarchical", "hybrid"):
        raise conflict(
            "train.all_reduce.algorithm",
            f"{train.all_reduce.algorithm} cannot stop half way, with one shard of the mean on each rank, as "
            "train.weight_update=sharded asks; use torus2d, ring or flat",
        )


def check_momentum(train: TrainSection) -> None:
    """Raises where schedules or phases set a momentum that the update rule does not take from them."""
    name, have = train.optimizer.name, rules_with("momentum")
    if name in have:
        return
    given = [("train.schedule", train.schedule)]
    given += [(f"train.phases.{i}.schedule", phase.schedule) for i, phase in enumerate(train.phases) if phase.schedule]
    keys = [
        f"{key}.{option}"
        for key, schedule in given
        for option in ("momentum_start", "momentum_end", "momentum_correction")
        if getattr(schedule, option)
    ]
    keys += [f"train.phases.{i}.momentum" for i, phase in enumerate(train.phases) if phase.momentum is not None]
    keys += [f"train.phases.{i}.reset_momentum" for i, phase in enumerate(train.phases) if phase.reset_momentum]
    if keys:
        raise conflict(keys[0], f"{keys[0]} is for {listed(have)}; {name} has no such momentum: leave it out")


def check_neumann(train: TrainSection) -> None:
    """Raises where a part of the Neumann optimizer would not begin before the run ends."""
    section = train.optimizer.neumann
    if section.sgd_epochs >= train.epochs:
        raise conflict(
            "train.optimizer.neumann.sgd_epochs",
            f"{section.sgd_epochs:g} epochs of plain SGD do not end within a run of {train.epochs:g}; lower "
            "train.optimizer.neumann.sgd_epochs, or set train.optimizer.name=sgd",
        )
    if section.reset_epochs >= train.epochs:
        raise conflict(
            "train.optimizer.neumann.reset_epochs",
            f"the first reset after {section.reset_epochs:g} epochs never comes in a run of {train.epochs:g}; lower "
            "train.optimizer.neumann.reset_epochs",
        )


def check_step(config: RunDocument) -> None:
    """Raises where the ways to carry out an update exclude each other."""
    train = config.train
    if train.cuda_graph and train.all_reduce.algorithm == "ddp":
        raise conflict(
            "train.cuda_graph",
            "torch's DistributedDataParallel cannot be part of a CUDA graph of the whole update; set "
            "train.all_reduce.algorithm to one of ours, or train.cuda_graph=false",
        )
    if train.cuda_graph and train.optimizer.name == "shampoo":
        raise conflict(
            "train.cuda_graph",
            "Shampoo does more in some updates than in others (it takes inverse roots), and a CUDA graph replays one "
            "update for all; set train.cuda_graph=false",
        )
    if train.cuda_graph and train.compile in ("reduce-overhead", "max-autotune"):
        raise conflict(
            "train.compile",
            f"train.compile={train.compile} records CUDA graphs of its own, which cannot be recorded again; set "
            "train.compile to default or max-autotune-no-cudagraphs, or train.cuda_graph=false",
        )
    if train.cuda_graph and len(set(config.training_sizes)) > 1:
        sides = ", ".join(map(str, config.training_sizes))
        raise conflict(
            "train.cuda_graph",
            f"a CUDA graph is of one shape, and the training images have sides of {sides} px by the phases; set "
            "train.cuda_graph=false, or leave image_size out of train.phases",
        )
    if train.stem_compute == "space_to_depth" and config.model.small_stem:
        raise conflict("train.stem_compute", "the small stem has no stride to fold into channels; set it to plain")


def check_phases(train: TrainSection) -> None:
    """Raises where phases do not follow each other, or their schedules do not fit."""
    starts = [0.0, *(phase.start for phase in train.phases), train.epochs]
    for number, (before, start) in enumerate(pairwise(starts[:-1])):
        if start <= before:
            raise conflict(
                f"train.phases.{number}.start", f"phases must begin one after the other, got {start} after {before}"
            )
    if train.phases and starts[-2] >= train.epochs:
        raise conflict(
            f"train.phases.{len(train.phases) - 1}.start",
            f"a phase from epoch {starts[-2]} on never begins: the run ends after {train.epochs} epochs",
        )
    check_schedules(train)


def check_schedules(train: TrainSection) -> None:
    """Raises where a warm-up does not end within its schedule, or the schedule does not fit the optimizer."""
    schedules = [("train", 0.0, train.schedule)]
    schedules += [(f"train.phases.{i}", p.start, p.schedule) for i, p in enumerate(train.phases) if p.schedule]
    ends = [*(start for _, start, _ in schedules[1:]), train.epochs]
    for (key, start, schedule), end in zip(schedules, ends, strict=True):
        if schedule.warmup_epochs >= end - start:
            whole = "the run" if len(schedules) == 1 else "its schedule"
            raise conflict(
                f"{key}.schedule.warmup_epochs",
                f"a warm-up of {schedule.warmup_epochs} epochs does not end within {whole} of {end - start:g} epochs",
            )
        if schedule.momentum_correction and train.optimizer.form != "unscaled":
            raise conflict(
                f"{key}.schedule.momentum_correction",
                f"momentum correction is for a buffer that holds the learning rate, and that of {train.optimizer.name} "
                f"is {train.optimizer.form} here: set train.optimizer.momentum_form=unscaled, or leave it out",
            )


def check_ranks(config: RunDocument, devices: int) -> None:
    """Raises where the document does not fit so many devices; called again once that number is known."""
    train, shared = config.train, sharers(config)
    if devices % shared:
        down, across = train.spatial_partitions
        raise conflict(
            "train.spatial_partitions",
            f"{down} x {across} devices that share images do not divide the {devices} devices of the run",
        )
    ranks = devices // shared
    if train.global_batch % (ranks * train.accumulation):
        raise conflict(
            "train.global_batch",
            f"train.global_batch {train.global_batch} is not divisible by ranks x accumulation = "
            f"{ranks} x {train.accumulation}",
        )
    batch_norm_span(config, devices)
    row = train.all_reduce.row
    if row is not None and devices % row:
        raise conflict("train.all_reduce.row", f"rows of {row} ranks do not divide the {devices} ranks of the run")


def fits_devices(config: RunDocument, devices: int) -> bool:
    """Whether batch, spans and rows of a document fit so many devices; of one whose batch was changed by hand."""
    try:
        check_span(config)
        check_ranks(config, devices)
    except PydanticCustomError:
        return False
    return True


def check_processes(config: RunDocument, processes: int) -> None:
    """Raises where each of so many processes, with one rank or several, cannot have the same part of the batch."""
    train = config.train
    if train.global_batch % (processes * train.accumulation):
        raise conflict(
            "train.global_batch",
            f"train.global_batch {train.global_batch} is not divisible by processes x accumulation = "
            f"{processes} x {train.accumulation}",
        )


def check_partitions(config: RunDocument) -> None:
    """Raises where images cannot be cut as the document says."""
    parts, side = config.train.spatial_partitions, config.input.image_size
    if any(side % of_side for of_side in parts):
        raise conflict(
            "train.spatial_partitions",
            f"images of {side} px cannot be cut into {parts[0]} x {parts[1]} equal parts; choose divisors of "
            "input.image_size",
        )
