"""Networks by their names in the document."""

from torch import nn

from podscale import models
from podscale.config import ModelSection
from podscale.models.inception import INCEPTION_NAMES
from podscale.pytorch.models.alexnet import AlexNet, alexnet
from podscale.pytorch.models.external import build_external
from podscale.pytorch.models.inception import Inception, InceptionOutputs, Outputs, inception
from podscale.pytorch.models.resnet import ResNet, resnet
from podscale.pytorch.models.stem import Stem, set_stem_compute
from podscale.pytorch.models.subsampled_conv import subsample_convs


def build_model(model: ModelSection, classes: int) -> nn.Module:
    """Build the network of a document's model section, initialised from torch's current seed, in fp32 on the CPU."""
    return subsample_convs(_build(model, classes))


def _build(model: ModelSection, classes: int) -> nn.Module:
    if model.is_external:
        return build_external(model, classes)
    if model.name in INCEPTION_NAMES:
        return inception(model, classes)
    return alexnet(model, classes) if model.name == models.ALEXNET else resnet(model, classes)


__all__ = ["AlexNet", "Inception", "InceptionOutputs", "Outputs", "ResNet", "Stem", "build_model", "set_stem_compute"]
