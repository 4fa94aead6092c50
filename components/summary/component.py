"""KFP component of the exit handler: summarize the run, however it ended."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def summary(
    document: str,
    status: dsl.PipelineTaskFinalStatus,
    page: dsl.Output[dsl.Markdown],
    run_id: str = "",
) -> None:
    """Stop the training job of a failed or cancelled run, and write the outcome of each stage.

    Args:
        document: The resolved run document as JSON.
        status: State of the pipeline, set by KFP.
        page: The summary.
        run_id: Replaces run.id of the document; empty: the document's own.
    """
    from podscale.components import steps

    steps.summarize(document, run_id, status, page)
