"""KFP component of the exit handler: summarize the run, however it ended."""

from typing import NamedTuple

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def summary(
    document: str,
    status: dsl.PipelineTaskFinalStatus,
    page: dsl.Output[dsl.Markdown],
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
) -> NamedTuple("Summary", [("errors", str)]):  # type: ignore[valid-type]
    """Stop the training job of a failed or cancelled run, and write the outcome of each stage.

    An exit handler cannot read the outputs of other tasks, so it resolves the document as the configure component does,
    and has its inputs.

    Args:
        document: The run document of the package as JSON.
        status: State of the pipeline, set by KFP.
        page: The summary.
        run_id: As for the configure component, like the inputs below.
        source: data.source of the document.
        epochs: train.epochs of the document.
        global_batch: train.global_batch of the document.
        learning_rate: train.schedule.learning_rate of the document.
        overrides: Further changes of the document.
        image: launch.image of the document.
        launcher_image: launch.launcher_image of the document.
        job_id: UUID of KFP's run.
        created: Creation time of KFP's run.
        scheduled: Planned time of a scheduled run.

    Returns:
        errors: Errors of the stages that failed, one line each; "none" without errors.
    """
    from podscale.components import steps
    from podscale.components.run_parameters import PipelineJob, RunParameters

    parameters = RunParameters(run_id, source, epochs, global_batch, learning_rate, overrides, image, launcher_image)
    return (steps.summarize(document, parameters, PipelineJob(job_id, created, scheduled), status, page),)
