"""Pipeline of a study: shards, then a ParallelFor over its sweep series, then the results.

Series that depend on the learning rate or the models of another series run in a later loop.
"""

from typing import Any

from podscale.components.shard.component import shard
from podscale.config import RunConfig, data_fingerprint
from podscale.kubernetes.job_spec import pod_telemetry
from podscale.pipelines.kfp_fast_import import dsl
from podscale.pipelines.package import KFP_VERSIONS, compile_to_yaml, has_security_context
from podscale.pipelines.task_placement import task_placer
from podscale.pipelines.training_pipeline import PlaceTask
from podscale.study import StudyDocument
from podscale.study.grid import TrialGrid

from podscale.components.cells.component import cells  # isort: skip (kfp_fast_import must import kfp first)
from podscale.components.findings.component import findings  # isort: skip


STUDY_PIPELINE_NAME = "podscale-study"


def study_package(study: StudyDocument, *, parallel: int, kfp: str = KFP_VERSIONS[-1]) -> str:
    """Compile the pipeline of a study, with `parallel` pods at a time, to a KFP package (YAML).

    Raises InputError if the study needs something that KFP's tasks do not support.
    """
    place = task_placer(as_pod_config(TrialGrid(study).series[0].config), security=has_security_context(kfp))
    text: str = compile_to_yaml(study_pipeline(study, place, parallel=parallel))
    return text


def study_pipeline(study: StudyDocument, place_task: PlaceTask = lambda task, role: None, *, parallel: int = 8) -> Any:
    """Return the pipeline of a study as kfp's pipeline object, with `parallel` pods at a time."""
    document, grid = study.model_dump_json(), TrialGrid(study)
    first = grid.known_trials(lambda key: None)  # those of a selection hold images out, so they have their own shards
    sections = [*(series.config.data for series in grid.all_series), *(trial.config.data for trial in first.values())]
    data = {data_fingerprint(section): section for section in sections}

    @dsl.pipeline(
        name=STUDY_PIPELINE_NAME, description=f"Podscale study {study.name}: {study.title or 'a grid of runs'}."
    )
    def pipeline() -> None:
        before = []
        for section in data.values():
            task = shard(data=section.model_dump_json(), workspace=grid.workspace)
            place_task(task.set_caching_options(enable_caching=True), "shard")
            before.append(task)
        for number, wave in enumerate(grid.waves()):
            items = [grid.all_series.index(series) for series in wave]
            with dsl.ParallelFor(items=items, name=f"series-{number}", parallelism=parallel) as index:
                task = cells(study=document, series=index).after(*before)
                place_task(task.set_caching_options(enable_caching=False), "train")
            before = [task]
        last = findings(study=document).after(*before)
        place_task(last.set_caching_options(enable_caching=False), "report")

    return pipeline


def as_pod_config(config: RunConfig) -> RunConfig:
    """Return the document for training in the task's own pod instead of by its launcher."""
    launch = config.launch.model_copy(update={"backend": "local"})
    return config.model_copy(update={"launch": launch, "telemetry": pod_telemetry(config)})
