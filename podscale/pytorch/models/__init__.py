"""Networks by their names in the document."""

from podscale import models
from podscale.config import ModelSection
from podscale.pytorch.models.alexnet import AlexNet, alexnet
from podscale.pytorch.models.heads import Heads, Outputs
from podscale.pytorch.models.inception import Inception, inception
from podscale.pytorch.models.resnet import ResNet, resnet
from podscale.pytorch.models.stem import Stem, choose_stem

Network = ResNet | AlexNet | Inception


def build_model(model: ModelSection, classes: int) -> Network:
    """The network of a document's model section, initialised from torch's current seed, in fp32 on the CPU."""
    if model.name in models.inception.NAMES:
        return inception(model, classes)
    return alexnet(model, classes) if model.name == models.ALEXNET else resnet(model, classes)


__all__ = [
    "AlexNet",
    "Heads",
    "Inception",
    "Network",
    "Outputs",
    "ResNet",
    "Stem",
    "alexnet",
    "build_model",
    "choose_stem",
    "inception",
    "resnet",
]
