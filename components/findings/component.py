"""The end of a study as a KFP component: what its runs say together."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def findings(study: str, page: dsl.Output[dsl.HTML], text: dsl.Output[dsl.Markdown]) -> None:
    """Writes table, curves and report of a study from the records in its workspace.

    Args:
        study: The study document as JSON, with the run document inside.
        page: The results as one file, no remote asset.
        text: The same as Markdown; its pictures are beside it in the workspace.
    """
    from podscale.components import steps

    steps.findings(study, page, text)
