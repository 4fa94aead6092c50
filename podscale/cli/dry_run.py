"""Plan of a run, for `podscale run --dry-run`."""

from podscale import models
from podscale.cli.input_need import describe_input
from podscale.config import RunConfig
from podscale.config.batch_phases import format_batches
from podscale.config.preflight import find_problems
from podscale.config.preflight.host import processes_per_node
from podscale.config.preflight.storage import shard_set_counts
from podscale.data.step_positions import step_positions
from podscale.runs import RunDirectory, dataset_directory, read_outcomes, stage_outcomes
from podscale.runs.checkpoint.format import steps_on_disk
from podscale.stages.known_data import known_data, start_problems
from podscale.training import schedules
from podscale.training.preflight import DEFAULT_CLASSES, estimate_memory, model_problem
from podscale.util import host_info
from podscale.util.formatting import format_bytes, format_count

UNKNOWN = "known once the shards are made"


def describe_run(config: RunConfig, *, fresh: bool = False) -> str:
    """Return the plan of a run as text."""
    if not fresh:
        stage_outcomes.check_run_document(config)
    counts, classes = known_data(config)
    rows = [
        ("run", f"{config.run.id} in {RunDirectory.for_config(config).path}"),
        ("data", _data_row(config, counts)),
        ("model", _model_row(config, classes)),
        *_start_rows(config),
        ("processes", _process_row(config)),
        ("training", _training_row(config, counts.get("train"))),
        ("evaluation", _evaluation_row(config, counts.get("validation"))),
        ("memory", _memory_row(config, classes)),
        ("input", describe_input(config)),
        *_stage_rows(config, fresh),
    ]
    text = "\n".join(f"{name:<11} {value}" for name, value in rows)
    problems = [*find_problems(config, "here"), *start_problems(config, "here", fresh=fresh)]
    if problems:
        text += "\n\nThis run could not start:\n" + "\n".join(f"  - {problem}" for problem in problems)
    return text


def _data_row(config: RunConfig, counts: dict[str, int]) -> str:
    directory = dataset_directory(config.run.workspace, config.data)
    if not counts:
        return f"{config.data.source} ({config.data.format}), images {UNKNOWN}; shards go to {directory}"
    splits = ", ".join(f"{format_count(number, 'image')} {name}" for name, number in counts.items())
    return f"{splits}, in {directory}"


def _model_row(config: RunConfig, classes: int | None) -> str:
    model = config.model
    stem = f", {'small' if model.small_stem else 'imagenet'} stem" if model.is_residual else ""
    options = ", ".join(f"{name} {value}" for name, value in model.options.items())
    name = model.name if model.is_external else f"{model.name} (width {model.width}{stem})"
    name += f" ({options})" if options else ""
    if model_problem(config, classes or DEFAULT_CLASSES) is not None:
        return f"{name}, which cannot train here"
    if classes is None:
        return f"{name}, number of classes {UNKNOWN}"
    spec = models.model_spec(config.model, classes)
    flops = spec.flops(config.input.image_size)
    text = f"{name}, {spec.num_parameters:,} parameters, {flops / 1e9:.3g} GFLOP per image forward, {classes} classes"
    if spec.published_input not in (None, (config.input.mean, config.input.std)):
        mean, std = (", ".join(f"{value:g}" for value in values) for values in spec.published_input)
        text += f"; its published weights take input.mean [{mean}] and input.std [{std}]"
    return text


def _start_rows(config: RunConfig) -> list[tuple[str, str]]:
    """Return the row of the initial weights, if the document names any."""
    start = config.train.start_from
    if start.run is not None:
        checkpoint = "newest checkpoint" if start.epoch is None else f"epoch {start.epoch:g}"
        return [("start", f"weights of the run {start.run}, {checkpoint}")]
    return [] if start.weights is None else [("start", f"weights of {start.weights}")]


def _process_row(config: RunConfig) -> str:
    ranks, accumulation = processes_per_node(config) * config.launch.nodes, config.train.accumulation
    gpus = host_info.visible_gpus()
    devices = f"{gpus} GPUs" if gpus else f"{host_info.cpu_count()} CPU cores"
    per_rank = config.train.global_batch // (ranks * accumulation)  # of the first phase
    passes = f" x {accumulation} accumulation" if accumulation > 1 else ""
    return f"{format_count(ranks, 'process')} on {devices}, {per_rank} images each{passes}"


def _training_row(config: RunConfig, images: int | None) -> str:
    text = f"{config.train.epochs:g} epochs of batches of {format_batches(config.train)}"
    if config.train.target_top1 is not None:
        text = f"until {config.train.target_top1:.2%} top-1, at most {text}"
    if config.train.phases:
        text += f", other settings from epoch {', '.join(f'{phase.start:g}' for phase in config.train.phases)}"
    if images is None:
        return f"{text}, steps {UNKNOWN}"
    steps = schedules.total_steps(config.train, images)
    seen = step_positions(config.train, images).images_before(steps)
    return f"{text}: {format_count(steps, 'step')}, {format_count(seen, 'image')}"


def _evaluation_row(config: RunConfig, images: int | None) -> str:
    every, offset = config.evaluate.every_epochs, config.evaluate.offset
    when = f"every {every:g} epochs and at the end" if every not in (0, 1) else "every epoch" if every else "at the end"
    if offset:
        when += f", first after epoch {offset:g}"
    return f"{format_count(images, 'image')} {when}" if images is not None else f"{when}, images {UNKNOWN}"


def _memory_row(config: RunConfig, classes: int | None) -> str:
    if model_problem(config, classes or DEFAULT_CLASSES) is not None:
        return "unknown"
    memory = estimate_memory(config, classes or DEFAULT_CLASSES, processes_per_node(config))
    text = (
        f"about {format_bytes(sum(memory))} per process: weights and gradients {format_bytes(memory.weights)}, "
        f"optimizer {format_bytes(memory.optimizer)}, activations {format_bytes(memory.activations)}"
    )
    available = host_info.memory_info().available
    if not host_info.visible_gpus() and available:
        text += f"; {format_bytes(available)} of main memory is free"
    return text


def _stage_rows(config: RunConfig, fresh: bool) -> list[tuple[str, str]]:
    shard_set = dataset_directory(config.run.workspace, config.data)
    rows = [("shard", "finished before, nothing to do" if shard_set_counts(config) else "to do")]
    redo = not shard_set_counts(config)
    for stage in stage_outcomes.planned_stages(config)[1:]:
        done = not fresh and not redo and stage_outcomes.finished_outcome(config, stage, shard_set) is not None
        redo = redo or not done
        rows.append((stage, "finished before, nothing to do" if done else _stage_action(config, stage, fresh)))
    return rows


def _stage_action(config: RunConfig, stage: str, fresh: bool) -> str:
    run = RunDirectory.for_config(config)
    if stage != "train" or fresh or config.checkpoint.resume == "never":
        return "to do"
    newest = next(iter(steps_on_disk(run.checkpoints)), None)
    if newest is None:
        return "to do"
    previous = read_outcomes(run.outcome).get("train")
    reason = f" (it ended with exit code {previous.exit_code})" if previous and not previous.is_done else ""
    return f"to continue from about step {newest}{reason}"
