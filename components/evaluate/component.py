"""KFP component of stage 3: evaluate a model."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    document: str,
    shard_set: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    confusion: dsl.Output[dsl.ClassificationMetrics],
) -> None:
    """Evaluate the trained model on every validation image exactly once, in this pod or by a job that it launches.

    Args:
        document: The resolved run document as JSON.
        shard_set: The manifest from the shard component.
        model: The trained model, for lineage; the weights are read from the run directory.
        metrics: Top-1, top-5, loss, calibration error, images/s.
        confusion: The confusion matrix, up to 20 classes; the report shows larger ones.
    """
    from podscale.components import steps

    steps.evaluate(document, shard_set, metrics, confusion)
