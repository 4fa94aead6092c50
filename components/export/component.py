"""KFP component of the last stage: write exported files of a model."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def export(
    document: str,
    shard_set: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    exported: dsl.Output[dsl.Model],
) -> None:
    """Write the trained model in the formats of the document, each file compared with the model.

    Args:
        document: The resolved run document as JSON.
        shard_set: The manifest from the shard component.
        model: The trained model, for lineage; the weights are read from the run directory.
        exported: The files, and the report of each check.
    """
    from podscale.components import steps

    steps.export(document, shard_set, exported)
