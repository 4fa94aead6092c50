"""KFP component of stage 4: write the report of a run."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def report(
    document: str,
    shard_set: dsl.Input[dsl.Dataset],
    metrics: dsl.Input[dsl.Metrics],
    page: dsl.Output[dsl.HTML],
    card: dsl.Output[dsl.Markdown],
) -> None:
    """Write the self-contained report and the model card.

    Args:
        document: The resolved run document as JSON.
        shard_set: The manifest from the shard component.
        metrics: The metrics of the evaluation, for lineage; the page is built from the run directory.
        page: The report, one file without remote assets.
        card: The model card.
    """
    from podscale.components import steps

    steps.report(document, shard_set, page, card)
