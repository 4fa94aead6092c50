"""Stage 2 as a KFP component: a shard set to a model."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def train(
    document: str,
    shard_set: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    run_id: str = "",
) -> None:
    """Trains the network of a run document, or continues an interrupted training.

    Where the document names a launcher (launch.backend), this pod trains nothing: it starts the job, or finds it at
    work, and waits for it.

    Args:
        document: The resolved run document as JSON.
        shard_set: The manifest that the shard component made.
        run_id: Takes the place of run.id in the document; empty: as the document says.
        model: Directory with model.safetensors, model.json and the model card once training is finished.
    """
    from podscale.components import steps

    steps.train(document, run_id, shard_set, model)
