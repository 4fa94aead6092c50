"""Stage 4 as a KFP component: the run as one page."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def report(
    document: str,
    shard_set: dsl.Input[dsl.Dataset],
    metrics: dsl.Input[dsl.Metrics],
    page: dsl.Output[dsl.HTML],
    card: dsl.Output[dsl.Markdown],
    run_id: str = "",
) -> None:
    """Writes the self-contained report and the model card.

    Args:
        document: The resolved run document as JSON.
        shard_set: The manifest that the shard component made.
        metrics: The figures of the evaluation, for lineage; the page is made from the run directory.
        page: The report: one file, no remote asset.
        card: The model card.
        run_id: Takes the place of run.id in the document; empty: as the document says.
    """
    from podscale.components import steps

    steps.report(document, run_id, shard_set, page, card)
