"""Part of a study as a KFP component: the runs of one chain."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def cells(study: str, chain: int) -> None:
    """Runs what is missing of one chain of a study: its learning rates, then its seeds, one run after the other.

    A run that diverges is a result. The records are kept in the workspace, so that a second attempt goes on.

    Args:
        study: The study document as JSON, with the run document inside.
        chain: Number of the chain in the order of the document, from 0.
    """
    from podscale.components import steps

    steps.cells(study, chain)
