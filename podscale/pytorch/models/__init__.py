"""Networks by their names in the document."""

from torch import nn

from podscale.config import ModelSection
from podscale.pytorch.models.resnet import ResNet, resnet


def build_model(model: ModelSection, classes: int) -> nn.Module:
    """The network of a document's model section, initialised from torch's current seed, in fp32 on the CPU."""
    return resnet(model, classes)


__all__ = ["ResNet", "build_model", "resnet"]
