"""A stage between 2 and 3 as a KFP component: a snapshot to a member of an ensemble."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def collapse(
    document: str,
    shard_set: dsl.Input[dsl.Dataset],
    main: dsl.Input[dsl.Model],
    model: dsl.Output[dsl.Model],
    cycle: int,
    run_id: str = "",
) -> None:
    """Trains one member of a document's ensemble from the snapshot that the training kept, or continues it.

    Args:
        document: The resolved run document of the whole ensemble as JSON.
        shard_set: The manifest that the shard component made.
        main: The model of the training in cycles, for lineage; the snapshot is read from its run directory.
        cycle: The cycle at whose end the snapshot was taken, from 0.
        run_id: Takes the place of run.id in the document; empty: as the document says.
        model: Directory with the member's model.safetensors and model.json.
    """
    from podscale.components import steps

    steps.collapse(document, run_id, cycle, shard_set, model)
