"""Training pipeline: shard -> train -> evaluate -> report, and a summary in every case.

If the document has an ensemble, its snapshots are collapsed in parallel between train and evaluate, and evaluate scores
the members together. The same function compiles for a cluster and runs locally.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from podscale.config import RunConfig
from podscale.pipelines.kfp_fast_import import dsl
from podscale.runs.ensemble_members import ensemble_members

from podscale.components.collapse.component import collapse  # isort: skip (kfp_fast_import must import kfp first)
from podscale.components.evaluate.component import evaluate  # isort: skip
from podscale.components.pack.component import pack  # isort: skip
from podscale.components.report.component import report  # isort: skip
from podscale.components.shard.component import shard  # isort: skip
from podscale.components.summary.component import summary  # isort: skip
from podscale.components.train.component import train  # isort: skip


TRAINING_PIPELINE_NAME = "podscale-training"
"""One name for all runs: a backend shares its cache between the runs of one pipeline name."""

TaskRole = Literal["shard", "train", "evaluate", "report", "launcher", "summary"]
PlaceTask = Callable[[Any, TaskRole], None]
"""Sets image, resources and node of a task; the role is that of its pod."""


@dataclass(frozen=True)
class PipelineOptions:
    """Options of the training pipeline.

    Args:
        parts: number of pods that share the packing.
        cache: let the backend reuse the shard stage's result.
        parallel: train the members of an ensemble in parallel; False on one machine, whose devices they would share.
    """

    place_task: PlaceTask = lambda task, role: None
    parts: int = 1
    cache: bool = True
    parallel: bool = True


def training_pipeline(config: RunConfig, options: PipelineOptions = PipelineOptions()) -> Any:
    """Return the pipeline of a run document as kfp's pipeline object.

    Its parameter `run_id` replaces run.id, so that one uploaded package serves runs of several names.
    """
    document = config.model_dump_json()
    launched = config.launch.backend != "local"

    @dsl.pipeline(
        name=TRAINING_PIPELINE_NAME,
        description=f"Podscale run {config.run.id}: images to a trained, evaluated classifier.",
    )
    def pipeline(run_id: str = config.run.id) -> None:
        finish = _configure_task(summary(document=document, run_id=run_id), "summary", options)
        with dsl.ExitHandler(exit_task=finish, name="stages"):
            shards = _shard_task(config, options)
            trained = _configure_task(
                train(document=document, run_id=run_id, shard_set=shards),
                "launcher" if launched else "train",
                options,
            )
            model = trained.outputs["model"]
            collapsed = _collapse_tasks(config, options, run_id=run_id, shard_set=shards, main=model)
            evaluated = _configure_task(
                evaluate(document=document, run_id=run_id, shard_set=shards, model=model), "evaluate", options
            ).after(*collapsed)
            _configure_task(
                report(document=document, run_id=run_id, shard_set=shards, metrics=evaluated.outputs["metrics"]),
                "report",
                options,
            )

    return pipeline


def _shard_task(config: RunConfig, options: PipelineOptions) -> Any:
    """Add the shard task and return its artifact; with several parts, pods pack and the shard task completes."""
    data, workspace = config.data.model_dump_json(), config.run.workspace
    packed = []
    if options.parts > 1:
        with dsl.ParallelFor(items=list(range(options.parts)), name="pack-parts", parallelism=options.parts) as index:
            part = pack(data=data, workspace=workspace, index=index, of=options.parts)
            packed.append(_configure_task(part, "shard", options, cached=True))
    task = _configure_task(shard(data=data, workspace=workspace), "shard", options, cached=True)
    return task.after(*packed).outputs["shard_set"]


def _collapse_tasks(config: RunConfig, options: PipelineOptions, **inputs: Any) -> list[Any]:
    """Add the tasks that train the members of the document's ensemble; empty without an ensemble."""
    role: TaskRole = "launcher" if config.launch.backend != "local" else "train"
    document, cycles = config.model_dump_json(), [member.cycle for member in ensemble_members(config)]
    if cycles and options.parallel:
        with dsl.ParallelFor(items=cycles, name="collapse-snapshots", parallelism=len(cycles)) as cycle:
            return [_configure_task(collapse(document=document, cycle=cycle, **inputs), role, options)]
    tasks: list[Any] = []
    for cycle in cycles:
        task = _configure_task(collapse(document=document, cycle=cycle, **inputs), role, options)
        tasks.append(task.after(*tasks[-1:]))
    return tasks


def _configure_task(task: Any, role: TaskRole, options: PipelineOptions, *, cached: bool = False) -> Any:
    """Set caching and placement of a task.

    Caching is set on every task, because the option at submission does not reach tasks inside an exit handler.
    """
    task.set_caching_options(enable_caching=cached and options.cache)
    options.place_task(task, role)
    return task
