"""Model catalogue: canonical names, shapes and roles of a network's parameters, and its costs.

Checkpoints and an optimizer's skip list use these names in both engines. Shapes are torchvision's: convolutions are
OIHW, linear layers (out, in). The names of residual networks and of Inception-V3 are torchvision's too;
Inception-ResNet-V2 has timm's. AlexNet has names of its own, because torchvision numbers its layers and batch norm
would shift the numbers. Nothing here imports a framework.
"""

from podscale.config import ModelSection
from podscale.models import alexnet, inception, resnet
from podscale.models.spec import (
    HALVING_WINDOW,
    BufferSpec,
    LayerSpec,
    ModelSpec,
    ParamSpec,
    Role,
    Shape,
    Window,
    WindowPath,
)

ALEXNET = "alexnet"


def model_spec(model: ModelSection, classes: int) -> ModelSpec:
    family = inception if model.name in inception.INCEPTION_NAMES else alexnet if model.name == ALEXNET else resnet
    return ModelSpec(model.name, tuple(family.layers(model, classes)))


__all__ = [
    "ALEXNET",
    "HALVING_WINDOW",
    "BufferSpec",
    "LayerSpec",
    "ModelSpec",
    "ParamSpec",
    "Role",
    "Shape",
    "Window",
    "WindowPath",
    "alexnet",
    "inception",
    "model_spec",
    "resnet",
]
