"""Checks across the sections of a run document, without files, devices or a cluster."""

from itertools import pairwise

from pydantic_core import PydanticCustomError

from podscale.config.batch_norm_groups import batch_norm_group, check_batch_norm_span, devices_per_rank
from podscale.config.batch_phases import batch_phases, check_each_batch
from podscale.config.engine_support import check_engine_support, check_model, requests_tpus
from podscale.config.ensemble import check_ensemble
from podscale.config.fields import conflict_error, input_error
from podscale.config.input_checks import check_input
from podscale.config.optimizer import check_optimizer_options, optimizers_with
from podscale.config.run import RunDocument
from podscale.config.train import TrainSection
from podscale.util.formatting import join_words


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


def check_fine_tuning(train: TrainSection) -> None:
    """Raise if options for parts of the model have no effect, or the optimizer does not fit them."""
    if train.freeze_batch_norm and not train.freeze:
        raise conflict_error("train.freeze_batch_norm", "no parameter is frozen", hint="Set train.freeze.")
    if train.freeze and train.precision == "bf16-pure":
        problem = "rounds frozen weights for good, which have no fp32 masters"
        raise conflict_error("train.precision", problem, got="bf16-pure", hint="Set it to bf16, or train.freeze=[].")
    if train.head != "auto" and train.start_from.run is None and train.start_from.weights is None:
        raise conflict_error("train.head", "needs initial weights", got=train.head, hint="Set train.start_from.")
    scaled = "learning_rate_scale" if train.learning_rate_scale else "layer_decay" if train.layer_decay else ""
    if scaled and train.optimizer.name in ("nlcg", "neumann"):
        problem = f"{train.optimizer.name} steps all weights along one direction"
        raise conflict_error(f"train.{scaled}", problem, hint="Leave it out, or take another optimizer.")


def check_batch(config: RunDocument) -> None:
    """Raise if a global batch does not divide into the ranks or processes that the document sets."""
    processes = config.launch.processes * config.launch.nodes
    if not processes or requests_tpus(config):
        check_each_batch(config, check_batch_divisible)
    elif config.train.engine == "pytorch":
        check_each_batch(config, lambda each: check_device_count(each, processes))
    else:
        check_each_batch(config, lambda each: check_batch_divisible(each, processes, "processes"))


def check_batch_divisible(config: RunDocument, parts: int = 1, unit: str = "") -> None:
    """Raise if the global batch does not divide into equal passes of `parts` ranks or processes."""
    batch, accumulation = config.train.global_batch, config.train.accumulation
    if batch % (parts * accumulation):
        passes = f"{unit} x accumulation = {parts} x" if unit else "train.accumulation"
        raise conflict_error("train.global_batch", f"not divisible by {passes} {accumulation}", got=batch)


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


def check_optimizer(train: TrainSection) -> None:
    """Raise if options of the optimizer conflict, with each other or with the schedule."""
    optimizer = train.optimizer
    check_optimizer_options(optimizer)
    check_momentum(train)
    if optimizer.name == "neumann":
        check_neumann(train)
        check_constant_batch(train)
    if optimizer.nesterov and optimizer.momentum == 0:
        raise conflict_error("train.optimizer.nesterov", "needs momentum", hint="Set train.optimizer.momentum above 0.")
    if optimizer.name in ("adam", "rmsprop") and optimizer.effective_eps == 0:
        raise conflict_error(
            "train.optimizer.eps",
            f"{optimizer.name} divides by the root of an average that may be 0",
            got=0,
            hint="Set train.optimizer.eps above 0, or leave it out.",
        )


def check_numerics(train: TrainSection) -> None:
    """Raise if the loss or the precision does not have an option that is set."""
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


def check_weight_update(train: TrainSection) -> None:
    """Raise if the optimizer or the all-reduce does not support the weight update."""
    algorithm, sharded = train.all_reduce.algorithm, train.weight_update == "sharded"
    if train.optimizer.name == "shampoo" and sharded:
        raise conflict_error(
            "train.weight_update",
            "Shampoo needs whole blocks of the gradient, and a sharded update leaves each rank a part",
            got="sharded",
            hint="Set train.weight_update=replicated: statistics and their roots are spread over the ranks anyway.",
        )
    if train.weight_gather == "bf16" and not sharded:
        raise conflict_error(
            "train.weight_gather",
            "only a sharded update gathers weights",
            got="bf16",
            hint="Set train.weight_update=sharded, or train.weight_gather=fp32.",
        )
    if train.all_reduce.shard_over == "world" and not sharded:
        raise conflict_error(
            "train.all_reduce.shard_over",
            "only a sharded update is divided over ranks",
            got="world",
            hint="Set train.weight_update=sharded, or train.all_reduce.shard_over=row.",
        )
    if algorithm == "ddp" and (sharded or train.precision == "bf16-pure"):
        raise conflict_error(
            "train.all_reduce.algorithm",
            "ddp reduces whole fp32 gradients: it goes with train.weight_update=replicated and with fp32, bf16 or fp16",
            got="ddp",
            hint="Choose another algorithm.",
        )
    if sharded and algorithm in ("tree", "hierarchical", "hybrid"):
        raise conflict_error(
            "train.all_reduce.algorithm",
            "has no reduce-scatter, which train.weight_update=sharded needs",
            got=algorithm,
            hint="Use torus2d, ring or flat.",
        )


def check_batch_norm_momentum(train: TrainSection) -> None:
    """Raise if a phase sets a momentum of batch norm that a CUDA graph, which records the number, cannot change."""
    numbers = [number for number, phase in enumerate(train.phases) if phase.batch_norm_momentum is not None]
    if numbers and train.cuda_graph:
        raise conflict_error(
            f"train.phases.{numbers[0]}.batch_norm_momentum",
            "a CUDA graph holds one value for the whole run",
            hint="Leave it out, or set train.cuda_graph=false.",
        )


def check_momentum(train: TrainSection) -> None:
    """Raise if schedules or phases set a momentum that the optimizer does not have."""
    name, supporting = train.optimizer.name, optimizers_with("momentum")
    if train.optimizer.has_option("momentum"):
        return
    schedules = [("train.schedule", train.schedule)]
    schedules += [
        (f"train.phases.{i}.schedule", phase.schedule) for i, phase in enumerate(train.phases) if phase.schedule
    ]
    keys = [
        f"{key}.{option}"
        for key, schedule in schedules
        for option in ("momentum_start", "momentum_end", "momentum_correction")
        if getattr(schedule, option)
    ]
    keys += [f"train.phases.{i}.momentum" for i, phase in enumerate(train.phases) if phase.momentum is not None]
    keys += [f"train.phases.{i}.reset_momentum" for i, phase in enumerate(train.phases) if phase.reset_momentum]
    if keys:
        raise conflict_error(
            keys[0], f"only {join_words(supporting)} have this momentum, not {name}", hint="Leave it out."
        )


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
            f"there is no reset within a run of {train.epochs:g} epochs",
            got=section.reset_epochs,
            hint="Lower it.",
        )


def check_constant_batch(train: TrainSection) -> None:
    """Raise if the batch changes with Neumann, whose momentum and resets follow one count of steps (Krishnan 2018)."""
    for phase in batch_phases(train):
        if phase.global_batch != train.global_batch:
            raise conflict_error(
                phase.batch_option,
                f"the momentum and the resets of {train.optimizer.name} follow one count of steps, which its paper "
                "defines for a constant batch only",
                got=phase.global_batch,
                hint="Leave it out, or take another optimizer.",
            )


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
            span = "the run" if len(schedules) == 1 else "its schedule"
            raise conflict_error(
                f"{key}.schedule.warmup_epochs",
                f"the warm-up does not end within {span} of {end - start:g} epochs",
                got=schedule.warmup_epochs,
                hint=f"Set it below {end - start:g}.",
            )
        if schedule.momentum_correction and train.optimizer.effective_momentum_form != "unscaled":
            raise conflict_error(
                f"{key}.schedule.momentum_correction",
                f"needs a momentum buffer that contains the learning rate, and the momentum form of "
                f"{train.optimizer.name} is {train.optimizer.effective_momentum_form} here",
                hint="Set train.optimizer.momentum_form=unscaled, or leave it out.",
            )


def check_ranks(config: RunDocument, devices: int) -> None:
    """Raise InputError if a valid document does not fit a number of devices, with the batch of each phase."""
    try:
        check_each_batch(config, lambda each: check_device_count(each, devices))
    except PydanticCustomError as error:
        raise input_error(error.context) from None


def check_device_count(config: RunDocument, devices: int) -> None:
    """Raise if the document does not fit a number of devices."""
    train, shared = config.train, devices_per_rank(config)
    if devices % shared:
        down, across = train.spatial_partitions
        raise conflict_error(
            "train.spatial_partitions",
            f"{down} x {across} devices share an image, and this does not divide the {devices} devices of the run",
            got=train.spatial_partitions,
        )
    ranks = devices // shared
    check_batch_divisible(config, ranks, "ranks")
    batch_norm_group(config, devices)
    row = train.all_reduce.row
    if row is not None and devices % row:
        raise conflict_error("train.all_reduce.row", f"does not divide the {devices} ranks of the run", got=row)


def fits_devices(config: RunDocument, devices: int) -> bool:
    """Return True if batch, spans and rows of a document fit the number of devices."""
    try:
        check_each_batch(config, check_batch_norm_span)
        check_each_batch(config, lambda each: check_device_count(each, devices))
    except PydanticCustomError:
        return False
    return True


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
