"""The pipeline: shard -> train -> evaluate -> report, and a summary whatever happens.

The same function compiles for a cluster and runs here.
"""

from typing import Any

from podscale.config import RunConfig
from podscale.pipelines.kfp_quickly import dsl

from podscale.components.evaluate.component import evaluate  # isort: skip (kfp_quickly must import kfp first)
from podscale.components.report.component import report  # isort: skip
from podscale.components.shard.component import shard  # isort: skip
from podscale.components.summary.component import summary  # isort: skip
from podscale.components.train.component import train  # isort: skip

NAME = "podscale-training"
"""One name for all runs: a backend shares its cache between the runs of one pipeline name."""


def training_pipeline(config: RunConfig, *, retries: int | None = None) -> Any:
    """The pipeline of a run document, as kfp's pipeline object.

    retries: how often a failed stage is started again; default: launch.retries. (Here, kfp would repeat bad input.)
    """
    document = config.model_dump_json()
    attempts = config.launch.retries if retries is None else retries

    @dsl.pipeline(name=NAME, description=f"Podscale run {config.run.id}: images to a trained, evaluated classifier.")
    def pipeline() -> None:
        finish = _placed(summary(document=document), config, retries=0)
        with dsl.ExitHandler(exit_task=finish, name="stages"):
            shards = _placed(
                shard(data=config.data.model_dump_json(), workspace=config.run.workspace), config, retries=attempts
            )
            shards.set_caching_options(enable_caching=True)
            trained = _placed(
                train(document=document, shard_set=shards.outputs["shard_set"]),
                config,
                retries=attempts,
                accelerated=True,
            )
            evaluated = _placed(
                evaluate(document=document, shard_set=shards.outputs["shard_set"], model=trained.outputs["model"]),
                config,
                retries=attempts,
                accelerated=True,
            )
            _placed(
                report(document=document, shard_set=shards.outputs["shard_set"], metrics=evaluated.outputs["metrics"]),
                config,
                retries=attempts,
            )

    return pipeline


def _placed(task: Any, config: RunConfig, *, retries: int, accelerated: bool = False) -> Any:
    """Image, resources and retries from the document. Nothing is cached unless a stage says so afterwards, because a
    switch given at submission does not reach tasks inside an exit handler."""
    launch = config.launch
    task.set_container_image(launch.image)
    task.set_caching_options(enable_caching=False)
    if launch.resources.cpus:
        task.set_cpu_request(f"{launch.resources.cpus:g}").set_cpu_limit(f"{launch.resources.cpus:g}")
    if launch.resources.memory_gib:
        amount = f"{round(launch.resources.memory_gib * 1024)}Mi"
        task.set_memory_request(amount).set_memory_limit(amount)
    if accelerated and launch.resources.accelerators:
        task.set_accelerator_type(launch.resources.accelerator).set_accelerator_limit(launch.resources.accelerators)
    if retries:
        # backoff_max_duration is the total time since the first attempt: with less than a stage may take, a stage
        # that ran for long and then failed would never be retried.
        task.set_retry(
            retries,
            backoff_duration="60s",
            backoff_factor=2.0,
            backoff_max_duration=f"{round(launch.time_limit_hours * 3600)}s",
        )
    return task
