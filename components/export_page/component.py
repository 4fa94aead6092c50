"""KFP component of the last stage, for documents with a page: as `export`, with the page as an output of its own.

It has the name of the other component, so that the task is called `export` in every pipeline, as its stage is.
"""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def export(
    document: str,
    shard_set: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    exported: dsl.Output[dsl.Model],
    page: dsl.Output[dsl.HTML],
) -> None:
    """Write the trained model in the formats of the document, and show its page, which classifies pictures.

    Args:
        document: The resolved run document as JSON; its formats include html or html-int8.
        shard_set: The manifest from the shard component.
        model: The trained model, for lineage; the weights are read from the run directory.
        exported: The files, and the report of each check.
        page: The page with the model, in fp32 if the document has both.
    """
    from podscale.components import steps

    steps.export(document, shard_set, exported, page)
