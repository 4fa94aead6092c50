"""KFP component of a study: the trials of one sweep series."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def cells(study: str, series: int) -> None:
    """Run the missing trials of one series of a study in sequence: its learning rates, then its seeds.

    A trial that diverges is a result. The records are in the workspace, so that a second attempt continues.

    Args:
        study: The study document as JSON, with the run document inside.
        series: Number of the series, from 0: those of the variants, grid point by grid point, then the pretraining.
    """
    from podscale.components import steps

    steps.cells(study, series)
