"""`podscale run --dry-run`: what a run would do, said before anything is started."""

from podscale import models
from podscale.config import RunConfig, TrainSection
from podscale.config.preflight import find_problems
from podscale.config.preflight.host import processes_per_node
from podscale.config.preflight.storage import shard_set_counts
from podscale.runs import RunDirectory, dataset_directory, read_outcomes, stage_outcomes
from podscale.training import schedules
from podscale.training.param_layout import preconditioner_elements
from podscale.util import host_info
from podscale.util.formatting import format_bytes, format_count

FLOAT_BYTES = {"fp32": 4, "bf16": 2, "bf16-pure": 2, "fp16": 2}
MOMENTS = {"sgd": 1, "lars": 1, "lamb": 2, "adam": 2, "rmsprop": 2, "nlcg": 3, "neumann": 2, "shampoo": 1}
"""fp32 values that a rule keeps of each weight; in some of its forms (see `_state_bytes`) one more."""
UNKNOWN = "known once the shards are made"


def describe_run(config: RunConfig, *, fresh: bool = False) -> str:
    """The plan of a run as text: place, data, model, training, memory, stages, problems. Nothing is written."""
    if not fresh:
        stage_outcomes.check_run_document(config)
    counts, classes = known_data(config)
    rows = [
        ("run", f"{config.run.id} in {RunDirectory.for_config(config).path}"),
        ("data", _data_row(config, counts)),
        ("model", _model_row(config, classes)),
        ("processes", _process_row(config)),
        ("training", _training_row(config, counts.get("train"))),
        ("evaluation", _evaluation_row(config, counts.get("validation"))),
        ("memory", _memory_row(config, classes)),
        *_stage_rows(config, fresh),
    ]
    text = "\n".join(f"{name:<11} {value}" for name, value in rows)
    problems = find_problems(config, "here")
    if problems:
        text += "\n\nThis run could not start:\n" + "\n".join(f"  - {problem}" for problem in problems)
    return text


def known_data(config: RunConfig) -> tuple[dict[str, int], int | None]:
    """Images by split and number of classes, as far as they are known without reading the source."""
    counts = shard_set_counts(config)
    if counts:
        return counts, _classes(config)
    if config.data.source == "digits":
        return {}, 10
    return {}, len(config.data.classes) if config.data.classes else None


def _classes(config: RunConfig) -> int:
    from podscale.data.shard_set import ShardSet

    return len(ShardSet.open(dataset_directory(config.run.workspace, config.data)).classes)


def _data_row(config: RunConfig, counts: dict[str, int]) -> str:
    where = dataset_directory(config.run.workspace, config.data)
    if not counts:
        return f"{config.data.source} ({config.data.format}), images {UNKNOWN}; shards go to {where}"
    listing = ", ".join(f"{format_count(number, 'image')} {name}" for name, number in counts.items())
    return f"{listing}, in {where}"


def _model_row(config: RunConfig, classes: int | None) -> str:
    stem = f", {'small' if config.model.small_stem else 'imagenet'} stem" if config.model.is_residual else ""
    name = f"{config.model.name} (width {config.model.width}{stem})"
    if classes is None:
        return f"{name}, number of classes {UNKNOWN}"
    spec = models.model_spec(config.model, classes)
    flops = spec.flops(config.input.image_size)
    return f"{name}, {spec.num_parameters:,} parameters, {flops / 1e9:.3g} GFLOP per image forward, {classes} classes"


def _process_row(config: RunConfig) -> str:
    per_node = processes_per_node(config)
    ranks = per_node * config.launch.nodes
    gpus = host_info.visible_gpus()
    place = f"{gpus} GPUs" if gpus else f"{host_info.cpu_count()} CPU cores"
    parts = ranks * config.train.accumulation
    per_rank = config.train.global_batch // parts
    again = f" x {config.train.accumulation} accumulation" if config.train.accumulation > 1 else ""
    return f"{format_count(ranks, 'process')} on {place}, {per_rank} images each{again}"


def _training_row(config: RunConfig, images: int | None) -> str:
    text = f"{config.train.epochs:g} epochs of batches of {config.train.global_batch}"
    if config.train.target_top1 is not None:
        text = f"until {config.train.target_top1:.2%} top-1, at most {text}"
    if config.train.phases:
        text += f", other settings from epoch {', '.join(f'{phase.start:g}' for phase in config.train.phases)}"
    if images is None:
        return f"{text}, updates {UNKNOWN}"
    steps = schedules.total_steps(config.train, images)
    return f"{text}: {format_count(steps, 'update')}, {format_count(steps * config.train.global_batch, 'image')}"


def _evaluation_row(config: RunConfig, images: int | None) -> str:
    every = config.evaluate.every_epochs
    when = f"every {every:g} epochs and at the end" if every not in (0, 1) else "every epoch" if every else "at the end"
    return f"{format_count(images, 'image')} {when}" if images is not None else f"{when}, images {UNKNOWN}"


def _memory_row(config: RunConfig, classes: int | None) -> str:
    """Weights, gradients, momentum, and what forward keeps for backward: outputs of convolutions and of their norms."""
    spec = models.model_spec(config.model, classes or 1000)
    per_node = processes_per_node(config)
    ranks = per_node * config.launch.nodes
    weights, kept_beside = _state_bytes(config.train, spec.num_parameters, ranks, per_node)
    kept_beside += _matrix_bytes(config.train, spec, ranks)
    per_rank = config.train.global_batch // (ranks * config.train.accumulation)
    kept = 2 * spec.activation_elements(max(config.training_sizes)) * per_rank * FLOAT_BYTES[config.train.precision]
    text = (
        f"about {format_bytes(weights + kept_beside + kept)} per process: "
        f"weights and gradients {format_bytes(weights)}, "
        f"optimizer {format_bytes(kept_beside)}, activations {format_bytes(kept)}"
    )
    available = host_info.memory_info().available
    if not host_info.visible_gpus() and available:
        text += f"; {format_bytes(available)} of main memory is free"
    return text


def _state_bytes(train: TrainSection, size: int, ranks: int, per_node: int) -> tuple[int, int]:
    """Bytes of weights and gradients, and of what the optimizer keeps beside them (see pytorch.weights)."""
    sharded = train.weight_update == "sharded"
    pure, rounded = train.precision == "bf16-pure", train.weight_gather == "bf16"
    weights = {(False, False): 4, (True, False): 4 + 2, (True, True): 2, (False, True): 2 + 4}[pure, rounded]
    row = train.all_reduce.row or per_node if train.all_reduce.algorithm == "torus2d" else ranks
    rule = train.optimizer
    moments = MOMENTS[rule.name] + (rule.shampoo.graft != "sgd") + (rule.nlcg.beta == "polak_ribiere")
    kept = 4 * rounded + 4 * moments + 4 * (train.ema.decay is not None)
    return (4 + weights) * size, kept * size // (row if sharded else 1)


def _matrix_bytes(train: TrainSection, spec: models.ModelSpec, ranks: int) -> int:
    """Bytes of Shampoo's matrices on a rank: all inverse roots, and its part of the statistics."""
    if train.optimizer.name != "shampoo":
        return 0
    own = train.optimizer.shampoo
    elements = sum(preconditioner_elements(p.shape, own.block, vectors=own.vectors) for p in spec.parameters)
    return 4 * elements + 4 * elements // ranks


def _stage_rows(config: RunConfig, fresh: bool) -> list[tuple[str, str]]:
    shard_set = dataset_directory(config.run.workspace, config.data)
    rows = [("shard", "finished before, nothing to do" if shard_set_counts(config) else "to do")]
    redo = not shard_set_counts(config)
    for stage in stage_outcomes.STAGES[1:]:
        done = not fresh and not redo and stage_outcomes.finished_outcome(config, stage, shard_set) is not None
        redo = redo or not done
        rows.append((stage, "finished before, nothing to do" if done else _stage_action(config, stage, fresh)))
    return rows


def _stage_action(config: RunConfig, stage: str, fresh: bool) -> str:
    run = RunDirectory.for_config(config)
    if stage != "train" or fresh or config.checkpoint.resume == "never":
        return "to do"
    newest = max((int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")), default=None)
    if newest is None:
        return "to do"
    ended = read_outcomes(run.outcome).get("train")
    why = f" (it ended with exit code {ended.exit_code})" if ended and not ended.is_done else ""
    return f"to continue from about update {newest}{why}"
