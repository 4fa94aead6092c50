"""KFP component of a study: the trials of one sweep series (chain)."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def cells(study: str, chain: int) -> None:
    """Run the missing trials of one chain of a study in sequence: its learning rates, then its seeds.

    A trial that diverges is a result. The records are in the workspace, so that a second attempt continues.

    Args:
        study: The study document as JSON, with the run document inside.
        chain: Number of the chain in the order of the document, from 0.
    """
    from podscale.components import steps

    steps.cells(study, chain)
