"""KFP component of a study: write the results of all its trials."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def findings(study: str, page: dsl.Output[dsl.HTML], text: dsl.Output[dsl.Markdown]) -> None:
    """Write table, curves and report of a study from the records in its workspace.

    Args:
        study: The study document as JSON, with the run document inside.
        page: The results as one file without remote assets.
        text: The results as Markdown, without the charts.
    """
    from podscale.components import steps

    steps.findings(study, page, text)
