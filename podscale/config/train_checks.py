"""Checks of the train section: phases and schedules, the optimizer, numerics, the weight update, and fine-tuning."""

from itertools import pairwise

from podscale.config.batch_phases import batch_phases
from podscale.config.fields import conflict_error
from podscale.config.optimizer import check_optimizer_options, optimizers_with
from podscale.config.train import TrainSection
from podscale.util.formatting import join_words


def check_phases(train: TrainSection) -> None:
    """Raise if phases do not follow each other, or their schedules do not fit."""
    starts = [0.0, *(phase.start for phase in train.phases)]
    for number, (before, start) in enumerate(pairwise(starts)):
        if start <= before:
            raise conflict_error(
                f"train.phases.{number}.start", f"must be after the start of the phase before, {before}", got=start
            )
    if starts[-1] >= train.epochs:
        raise conflict_error(
            f"train.phases.{len(train.phases) - 1}.start",
            f"the phase never begins: the run ends after {train.epochs} epochs",
            got=starts[-1],
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
    if (optimizer := train.optimizer.name) in ("shampoo", "muon") and sharded:
        raise conflict_error(
            "train.weight_update",
            f"{optimizer} needs whole matrices of the gradient, and a sharded update leaves each rank a part",
            got="sharded",
            hint="Set train.weight_update=replicated: the work on the matrices is spread over the ranks anyway.",
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
