"""Networks by their names in the document."""

from podscale import models
from podscale.config import ModelSection
from podscale.pytorch.models.alexnet import AlexNet, alexnet
from podscale.pytorch.models.resnet import ResNet, resnet
from podscale.pytorch.models.stem import Stem, choose_stem


def build_model(model: ModelSection, classes: int) -> ResNet | AlexNet:
    """The network of a document's model section, initialised from torch's current seed, in fp32 on the CPU."""
    return alexnet(model, classes) if model.name == models.ALEXNET else resnet(model, classes)


__all__ = ["AlexNet", "ResNet", "Stem", "alexnet", "build_model", "choose_stem", "resnet"]
