"""The exit handler as a KFP component: what happened, whatever happened."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def summary(
    document: str,
    status: dsl.PipelineTaskFinalStatus,
    page: dsl.Output[dsl.Markdown],
    run_id: str = "",
) -> None:
    """Stops the training job of a run that failed or was cancelled, and writes how each stage ended.

    Args:
        document: The resolved run document as JSON.
        status: State of the pipeline, filled in by KFP.
        page: The summary.
        run_id: Takes the place of run.id in the document; empty: as the document says.
    """
    from podscale.components import steps

    steps.summarize(document, run_id, status, page)
