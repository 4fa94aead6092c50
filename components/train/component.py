"""KFP component of stage 2: train a model on a shard set."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def train(
    document: str,
    shard_set: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
) -> None:
    """Train the model of a run document, or continue an interrupted training.

    If the document names a launcher (launch.backend), this pod does not train: it submits the job, or finds it running,
    and waits for it.

    Args:
        document: The resolved run document as JSON.
        shard_set: The manifest from the shard component.
        model: Directory with model.safetensors, model.json and the model card, when training is finished.
    """
    from podscale.components import steps

    steps.train(document, shard_set, model)
