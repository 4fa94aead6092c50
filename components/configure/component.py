"""KFP component of the first task: apply the parameters of a run to its document, and check it."""

from typing import NamedTuple

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def configure(
    document: str,
    run_id: str,
    source: str,
    epochs: float,
    global_batch: int,
    learning_rate: float,
    overrides: list,  # type: ignore[type-arg]
    image: str,
    launcher_image: str,
    job_id: str = "",
    created: str = "",
    scheduled: str = "",
) -> NamedTuple("Configured", [("resolved", str), ("data", str)]):  # type: ignore[valid-type]
    """Resolve the run document of one run, and refuse invalid parameters and a workspace without a volume.

    Args:
        document: The run document of the package as JSON.
        run_id: The run's id; `{time}` in it becomes the time of the run.
        source: data.source of the document.
        epochs: train.epochs of the document.
        global_batch: train.global_batch of the document.
        learning_rate: train.schedule.learning_rate of the document.
        overrides: Further changes of the document, a list of section.key=value.
        image: Image of the stages, launch.image.
        launcher_image: Image of the launchers, launch.launcher_image.
        job_id: UUID of KFP's run, filled in by KFP.
        created: Creation time of KFP's run, filled in by KFP.
        scheduled: Planned time of a scheduled run, filled in by KFP.

    Returns:
        resolved: The run document of this run as JSON.
        data: Its data section as JSON, so that the shard component depends on nothing else.
    """
    from podscale.components import steps
    from podscale.components.run_parameters import PipelineJob, RunParameters

    parameters = RunParameters(run_id, source, epochs, global_batch, learning_rate, overrides, image, launcher_image)
    return steps.configure(document, parameters, PipelineJob(job_id, created, scheduled))
