"""The exit handler as a KFP component: what happened, whatever happened."""

from kfp import dsl

from podscale.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def summary(document: str, status: dsl.PipelineTaskFinalStatus, page: dsl.Output[dsl.Markdown]) -> None:
    """Writes how each stage ended.

    Args:
        document: The resolved run document as JSON.
        status: State of the pipeline, filled in by KFP.
        page: The summary.
    """
    from podscale.components import work

    work.summarize(document, status, page)
