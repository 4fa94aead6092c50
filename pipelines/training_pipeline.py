"""Training pipeline: configure -> shard -> train -> evaluate -> report, and a summary in every case.

The first task applies the parameters of a run to the document; a local run has none and begins with the shards. If the
document has an ensemble, its snapshots are collapsed in parallel between train and evaluate, and evaluate scores the
members together. If it has formats of exported files, export follows the report. The same tasks compile for a cluster
and run locally.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from podscale.config import RunConfig
from podscale.config.images import stage_image
from podscale.kubernetes.job_spec import launched_stages
from podscale.pipelines.kfp_fast_import import dsl
from podscale.runs.ensemble_members import ensemble_members
from podscale.runs.user_code import bundle_code

from podscale.components.collapse.component import collapse  # isort: skip (kfp_fast_import must import kfp first)
from podscale.components.configure.component import configure  # isort: skip
from podscale.components.evaluate.component import evaluate  # isort: skip
from podscale.components.export.component import export  # isort: skip
from podscale.components.export_page.component import export as export_with_page  # isort: skip
from podscale.components.pack.component import pack  # isort: skip
from podscale.components.report.component import report  # isort: skip
from podscale.components.run_parameters import RunParameters  # isort: skip
from podscale.components.shard.component import shard  # isort: skip
from podscale.components.summary.component import summary  # isort: skip
from podscale.components.train.component import train  # isort: skip


TRAINING_PIPELINE_NAME = "podscale-training"
"""One name for all runs: a backend shares its cache between the runs of one pipeline name."""

TaskRole = Literal["configure", "shard", "train", "evaluate", "report", "export", "launcher", "summary"]
LAUNCHER_ROLES: tuple[TaskRole, ...] = ("configure", "launcher", "summary")
"""Roles of small pods that do no stage's work themselves."""
PlaceTask = Callable[[Any, TaskRole], None]
"""Sets image, resources and node of a task; the role is that of its pod."""
JOB_PLACEHOLDERS = {
    "job_id": dsl.PIPELINE_JOB_ID_PLACEHOLDER,
    "created": dsl.PIPELINE_JOB_CREATE_TIME_UTC_PLACEHOLDER,
    "scheduled": dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER,
}
"""Inputs that KFP fills in. It does so if the whole input is the placeholder, not a part of it."""


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

    Its parameters replace values of the document, so that one uploaded package serves several runs; their defaults are
    the document's values. The first task applies them (see components/run_parameters.py).
    """

    @dsl.pipeline(name=TRAINING_PIPELINE_NAME, description=_description(config))
    def pipeline(
        run_id: str = config.run.id,
        source: str = config.data.source,
        epochs: float = config.train.epochs,
        global_batch: int = config.train.global_batch,
        learning_rate: float = config.train.schedule.learning_rate,
        overrides: list = [],  # type: ignore[type-arg]  # noqa: B006 (kfp compiles the default)
        image: str = stage_image(config),
        launcher_image: str = config.launch.launcher_image,
    ) -> None:
        tasks = _PipelineTasks(config, options, images=(image, launcher_image))
        inputs = {
            "document": bundle_code(config).model_dump_json(),
            "run_id": run_id,
            "source": source,
            "epochs": epochs,
            "global_batch": global_batch,
            "learning_rate": learning_rate,
            "overrides": overrides,
            "image": image,
            "launcher_image": launcher_image,
            **JOB_PLACEHOLDERS,
        }
        finish = tasks.configured(summary(**inputs), "summary")
        with dsl.ExitHandler(exit_task=finish, name="stages"):
            configuration = tasks.configured(configure(**inputs), "configure").outputs
            tasks.add_stages(configuration["resolved"], configuration["data"])

    return pipeline


def local_pipeline(config: RunConfig, options: PipelineOptions) -> Any:
    """Return the pipeline of a run document for this machine: without parameters, and hence without a first task."""

    @dsl.pipeline(name=TRAINING_PIPELINE_NAME, description=_description(config))
    def pipeline() -> None:
        tasks = _PipelineTasks(config, options)
        finish = summary(document=config.model_dump_json(), **asdict(RunParameters.of(config)))
        with dsl.ExitHandler(exit_task=tasks.configured(finish, "summary"), name="stages"):
            tasks.add_stages(config.model_dump_json(), config.data.model_dump_json())

    return pipeline


def _description(config: RunConfig) -> str:
    return f"Podscale run {config.run.id}: images to a trained, evaluated classifier."


@dataclass(frozen=True)
class _PipelineTasks:
    """Tasks of one pipeline.

    Args:
        images: image of the stages and of the launchers, as parameters; None: those that `options.place_task` sets.
    """

    config: RunConfig
    options: PipelineOptions
    images: tuple[Any, Any] | None = None

    def configured(self, task: Any, role: TaskRole, *, cached: bool = False) -> Any:
        """Set caching, placement and image of a task.

        Caching is set on every task, because the option at submission does not reach tasks inside an exit handler.
        """
        task.set_caching_options(enable_caching=cached and self.options.cache)
        self.options.place_task(task, role)
        if self.images is not None:
            task.set_container_image(self.images[role in LAUNCHER_ROLES])
        return task

    def add_stages(self, document: Any, data: Any) -> None:
        """Add the stages.

        Args:
            document: run document as JSON, a constant or an output.
            data: its data section as JSON. The shard stage depends on nothing else, so that its cached result remains
                valid when, for example, the learning rate changes.
        """
        shards = self._add_shard(data)
        inputs = {"document": document, "shard_set": shards}
        trained = self.configured(train(**inputs), self._role("train"))
        model = trained.outputs["model"]
        collapsed = self._add_collapses(**inputs, main=model)
        evaluated = self.configured(evaluate(**inputs, model=model), self._role("evaluate")).after(*collapsed)
        reported = self.configured(report(**inputs, metrics=evaluated.outputs["metrics"]), "report")
        if self.config.export.formats:  # last, because a run without an exported file has a report
            component = export if self.config.export.page is None else export_with_page
            self.configured(component(**inputs, model=model), "export").after(reported)

    def _role(self, stage: Literal["train", "evaluate"]) -> TaskRole:
        """Return the role of the pod of a stage's task, which may only launch a job."""
        return "launcher" if stage in launched_stages(self.config) else stage

    def _add_shard(self, data: Any) -> Any:
        """Add the shard task and return its artifact; with several parts, pods pack and the shard task completes."""
        inputs, parts = {"data": data, "workspace": self.config.run.workspace}, self.options.parts
        packed = []
        if parts > 1:
            with dsl.ParallelFor(items=list(range(parts)), name="pack-parts", parallelism=parts) as index:
                packed.append(self.configured(pack(**inputs, index=index, of=parts), "shard", cached=True))
        return self.configured(shard(**inputs), "shard", cached=True).after(*packed).outputs["shard_set"]

    def _add_collapses(self, **inputs: Any) -> list[Any]:
        """Add the tasks that train the members of the document's ensemble; empty without an ensemble."""
        cycles = [member.cycle for member in ensemble_members(self.config)]
        if cycles and self.options.parallel:
            with dsl.ParallelFor(items=cycles, name="collapse-snapshots", parallelism=len(cycles)) as cycle:
                return [self.configured(collapse(cycle=cycle, **inputs), self._role("train"))]
        tasks: list[Any] = []
        for cycle in cycles:
            task = self.configured(collapse(cycle=cycle, **inputs), self._role("train"))
            tasks.append(task.after(*tasks[-1:]))
        return tasks
