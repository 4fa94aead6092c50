"""Checks across the sections of a run document; they need no file, device or cluster."""

from itertools import pairwise

from pydantic_core import PydanticCustomError

from podscale.config.batch_norm_groups import batch_norm_group, check_batch_norm_span, devices_per_rank
from podscale.config.engine_support import check_engine_support, check_model, requests_tpus
from podscale.config.ensemble import check_ensemble
from podscale.config.fields import conflict_error
from podscale.config.optimizer import check_optimizer_options, optimizers_with
from podscale.config.run import RunDocument
from podscale.config.train import TrainSection
from podscale.util.formatting import join_words


def check_sections(config: RunDocument) -> None:
    """Raise if two fields, each valid alone, cannot both hold."""
    train, launch = config.train, config.launch
    check_engine_support(config)
    processes = launch.processes * launch.nodes if launch.processes else None
    if processes is None or requests_tpus(config):
        if train.global_batch % train.accumulation:
            raise conflict_error(
                "train.global_batch",
                f"not divisible by train.accumulation {train.accumulation}",
                got=train.global_batch,
            )
    elif train.engine == "pytorch":
        check_ranks(config, processes)
    else:
        check_processes(config, processes)
    check_step_options(config)
    check_partitions(config)
    check_batch_norm_span(config)
    check_phases(train)
    check_weight_update(train)
    check_ensemble(config.ensemble, train.epochs, config.checkpoint.snapshots)
    if train.start_from.epoch is not None and train.start_from.run is None:
        raise conflict_error("train.start_from.epoch", "needs a run", hint="Set train.start_from.run too.")
    if len(config.evaluate.models) == 1:
        raise conflict_error(
            "evaluate.models",
            "an ensemble of one is a single model",
            hint="Name two or more, or evaluate it as its own run.",
        )
    if config.evaluate.weights == "ema" and train.ema.decay is None:
        raise conflict_error(
            "evaluate.weights",
            "no running average of the weights is kept",
            got="ema",
            hint="Set train.ema.decay, such as 0.9999.",
        )
    if config.telemetry.mlperf_log and train.target_top1 is None:
        raise conflict_error(
            "telemetry.mlperf_log",
            "MLPerf times a run to a target accuracy",
            hint="Set train.target_top1 (0.759 for ResNet-50 on ImageNet).",
        )
    check_model(config)
    if config.input.decoded_cache_bytes and config.input.loader in ("dali", "nvjpeg"):
        raise conflict_error(
            "input.decoded_cache_bytes",
            f"input.loader={config.input.loader} keeps no decoded images",
            got=config.input.decoded_cache_bytes,
            hint="Set input.loader=torchvision, or input.decoded_cache_bytes=0.",
        )
    if config.input.augment.is_enabled and config.input.loader in ("dali", "nvjpeg"):
        raise conflict_error(
            "input.loader",
            "it only crops and mirrors, and input.augment asks for more",
            got=config.input.loader,
            hint="Set input.loader=torchvision, or leave input.augment out.",
        )
    if config.input.order == "global" and config.input.groups != 1:
        raise conflict_error(
            "input.groups", "needs input.order=blocked", got=config.input.groups, hint="Set that, or input.groups=1."
        )
    if config.input.order == "blocked" and train.global_batch % config.input.groups:
        raise conflict_error(
            "input.groups",
            f"does not divide train.global_batch {train.global_batch}",
            got=config.input.groups,
        )


def check_weight_update(train: TrainSection) -> None:
    """Raise if the optimizer, the precision and the weight update options conflict."""
    optimizer = train.optimizer
    check_optimizer_options(optimizer)
    check_momentum(train)
    if optimizer.name == "neumann":
        check_neumann(train)
    if optimizer.nesterov and optimizer.momentum == 0:
        raise conflict_error("train.optimizer.nesterov", "needs momentum", hint="Set train.optimizer.momentum above 0.")
    if optimizer.name in ("adam", "rmsprop") and optimizer.effective_eps == 0:
        raise conflict_error(
            "train.optimizer.eps",
            f"{optimizer.name} divides by the root of an average that may be 0",
            got=0,
            hint="Set train.optimizer.eps above 0, or leave it out.",
        )
    if optimizer.name == "shampoo" and train.weight_update == "sharded":
        raise conflict_error(
            "train.weight_update",
            "Shampoo's statistics are of whole blocks of the gradient, and a sharded update leaves each rank parts "
            "of them",
            got="sharded",
            hint="Set train.weight_update=replicated: statistics and their roots are spread over the ranks anyway.",
        )
    if train.binary_threshold is not None and train.loss != "binary_cross_entropy":
        raise conflict_error(
            "train.binary_threshold",
            "only binary cross entropy has a threshold",
            got=train.binary_threshold,
            hint="Set train.loss=binary_cross_entropy, or leave it out.",
        )
    if train.precision == "fp16" and train.loss_scale <= 1:
        raise conflict_error(
            "train.loss_scale",
            "fp16 without loss scaling loses small gradients",
            got=train.loss_scale,
            hint="Leave it at 65536, which adapts by itself, or set train.precision=bf16, which needs none.",
        )
    if train.weight_gather == "bf16" and train.weight_update != "sharded":
        raise conflict_error(
            "train.weight_gather",
            "only a sharded update gathers weights",
            got="bf16",
            hint="Set train.weight_update=sharded, or train.weight_gather=fp32.",
        )
    if train.all_reduce.algorithm == "ddp" and (train.weight_update == "sharded" or train.precision == "bf16-pure"):
        raise conflict_error(
            "train.all_reduce.algorithm",
            "ddp reduces whole fp32 gradients: it goes with train.weight_update=replicated and with fp32, bf16 or fp16",
            got="ddp",
            hint="Choose another algorithm.",
        )
    if train.weight_update == "sharded" and train.all_reduce.algorithm in ("tree", "hierarchical", "hybrid"):
        raise conflict_error(
            "train.all_reduce.algorithm",
            "train.weight_update=sharded needs a reduce-scatter, and it has none",
            got=train.all_reduce.algorithm,
            hint="Use torus2d, ring or flat.",
        )


def check_momentum(train: TrainSection) -> None:
    """Raise if schedules or phases set a momentum that the update rule does not take from them."""
    name, have = train.optimizer.name, optimizers_with("momentum")
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
        raise conflict_error(keys[0], f"for {join_words(have)}; {name} has no such momentum", hint="Leave it out.")


def check_neumann(train: TrainSection) -> None:
    """Raise if a part of the Neumann optimizer would not begin before the run ends."""
    section = train.optimizer.neumann
    if section.sgd_epochs >= train.epochs:
        raise conflict_error(
            "train.optimizer.neumann.sgd_epochs",
            f"plain SGD does not end within a run of {train.epochs:g} epochs",
            got=section.sgd_epochs,
            hint="Lower it, or set train.optimizer.name=sgd.",
        )
    if section.reset_epochs >= train.epochs:
        raise conflict_error(
            "train.optimizer.neumann.reset_epochs",
            f"the first reset never comes in a run of {train.epochs:g} epochs",
            got=section.reset_epochs,
            hint="Lower it.",
        )


def check_step_options(config: RunDocument) -> None:
    """Raise if options of the training step exclude each other."""
    train = config.train
    if train.cuda_graph and train.all_reduce.algorithm == "ddp":
        raise conflict_error(
            "train.cuda_graph",
            "torch's DistributedDataParallel cannot be part of a CUDA graph of the whole step",
            hint="Set train.all_reduce.algorithm to another one, or train.cuda_graph=false.",
        )
    if train.cuda_graph and train.optimizer.name == "shampoo":
        raise conflict_error(
            "train.cuda_graph",
            "Shampoo does more in some steps than in others (it takes inverse roots), and a CUDA graph replays one "
            "step for all",
            hint="Set train.cuda_graph=false.",
        )
    if train.cuda_graph and train.compile in ("reduce-overhead", "max-autotune"):
        raise conflict_error(
            "train.compile",
            "it records CUDA graphs of its own, which train.cuda_graph cannot record again",
            got=train.compile,
            hint="Set it to default or max-autotune-no-cudagraphs, or train.cuda_graph=false.",
        )
    if train.cuda_graph and len(set(config.training_sizes)) > 1:
        sides = ", ".join(map(str, config.training_sizes))
        raise conflict_error(
            "train.cuda_graph",
            f"a CUDA graph has one shape, and train.phases gives the training images sides of {sides} px",
            hint="Set train.cuda_graph=false, or leave image_size out of train.phases.",
        )
    if train.stem_compute == "space_to_depth" and config.model.small_stem:
        raise conflict_error(
            "train.stem_compute", "the small stem has no stride to fold into channels", hint="Set it to plain."
        )


def check_phases(train: TrainSection) -> None:
    """Raise if phases do not follow each other, or their schedules do not fit."""
    starts = [0.0, *(phase.start for phase in train.phases), train.epochs]
    for number, (before, start) in enumerate(pairwise(starts[:-1])):
        if start <= before:
            raise conflict_error(
                f"train.phases.{number}.start", f"must be after the start of the phase before, {before}", got=start
            )
    if train.phases and starts[-2] >= train.epochs:
        raise conflict_error(
            f"train.phases.{len(train.phases) - 1}.start",
            f"the phase never begins: the run ends after {train.epochs} epochs",
            got=starts[-2],
        )
    check_schedules(train)


def check_schedules(train: TrainSection) -> None:
    """Raise if a warm-up does not end within its schedule, or the schedule does not fit the optimizer."""
    schedules = [("train", 0.0, train.schedule)]
    schedules += [(f"train.phases.{i}", p.start, p.schedule) for i, p in enumerate(train.phases) if p.schedule]
    ends = [*(start for _, start, _ in schedules[1:]), train.epochs]
    for (key, start, schedule), end in zip(schedules, ends, strict=True):
        if schedule.warmup_epochs >= end - start:
            whole = "the run" if len(schedules) == 1 else "its schedule"
            raise conflict_error(
                f"{key}.schedule.warmup_epochs",
                f"the warm-up does not end within {whole} of {end - start:g} epochs",
                got=schedule.warmup_epochs,
            )
        if schedule.momentum_correction and train.optimizer.effective_momentum_form != "unscaled":
            raise conflict_error(
                f"{key}.schedule.momentum_correction",
                f"for a momentum buffer that holds the learning rate, and that of {train.optimizer.name} is "
                f"{train.optimizer.effective_momentum_form} here",
                hint="Set train.optimizer.momentum_form=unscaled, or leave it out.",
            )


def check_ranks(config: RunDocument, devices: int) -> None:
    """Raise if the document does not fit so many devices; called again once that number is known."""
    train, shared = config.train, devices_per_rank(config)
    if devices % shared:
        down, across = train.spatial_partitions
        raise conflict_error(
            "train.spatial_partitions",
            f"{down} x {across} devices share an image, which do not divide the {devices} devices of the run",
            got=train.spatial_partitions,
        )
    ranks = devices // shared
    if train.global_batch % (ranks * train.accumulation):
        raise conflict_error(
            "train.global_batch",
            f"not divisible by ranks x accumulation = {ranks} x {train.accumulation}",
            got=train.global_batch,
        )
    batch_norm_group(config, devices)
    row = train.all_reduce.row
    if row is not None and devices % row:
        raise conflict_error("train.all_reduce.row", f"rows do not divide the {devices} ranks of the run", got=row)


def fits_devices(config: RunDocument, devices: int) -> bool:
    """Return whether batch, spans and rows of a document fit the devices, after a change of the batch."""
    try:
        check_batch_norm_span(config)
        check_ranks(config, devices)
    except PydanticCustomError:
        return False
    return True


def check_processes(config: RunDocument, processes: int) -> None:
    """Raise if each of so many processes, with one rank or several, cannot have the same part of the batch."""
    train = config.train
    if train.global_batch % (processes * train.accumulation):
        raise conflict_error(
            "train.global_batch",
            f"not divisible by processes x accumulation = {processes} x {train.accumulation}",
            got=train.global_batch,
        )


def check_partitions(config: RunDocument) -> None:
    """Raise if images cannot be cut as the document says."""
    parts, side = config.train.spatial_partitions, config.input.image_size
    if any(side % of_side for of_side in parts):
        raise conflict_error(
            "train.spatial_partitions",
            f"images of {side} px cannot be cut into {parts[0]} x {parts[1]} equal parts",
            got=parts,
            hint="Choose divisors of input.image_size.",
        )
