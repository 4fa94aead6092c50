"""KFP component between stages 2 and 3: train an ensemble member from a snapshot."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def collapse(
    document: str,
    shard_set: dsl.Input[dsl.Dataset],
    main: dsl.Input[dsl.Model],
    model: dsl.Output[dsl.Model],
    cycle: int,
) -> None:
    """Train one member of a document's ensemble from a snapshot of the training, or continue its training.

    Args:
        document: The resolved run document of the whole ensemble as JSON.
        shard_set: The manifest from the shard component.
        main: The model of the training in cycles, for lineage; the snapshot is read from its run directory.
        cycle: The cycle at whose end the snapshot was taken, from 0.
        model: Directory with the member's model.safetensors and model.json.
    """
    from podscale.components import steps

    steps.collapse(document, cycle, shard_set, model)
