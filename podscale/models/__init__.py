"""Model catalogue: canonical names, shapes and roles of a network's parameters, and its costs.

Checkpoints and an optimizer's skip list use these names in both engines. Shapes are torchvision's: convolutions are
OIHW, linear layers (out, in). The names of residual networks and of Inception-V3 are torchvision's too;
Inception-ResNet-V2 has timm's. AlexNet has names of its own, because torchvision numbers its layers and batch norm
would shift the numbers. Nothing here imports a framework.

The entry of a model from torchvision, timm or a user's module is derived from the module itself, by the PyTorch engine.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from podscale.config import ModelSection
from podscale.errors import InputError
from podscale.models import alexnet, inception, resnet
from podscale.models.spec import (
    HALVING_WINDOW,
    BufferSpec,
    LayeredSpec,
    LayerSpec,
    ModelSpec,
    Normalisation,
    ParamSpec,
    Role,
    Shape,
    Window,
    WindowPath,
)

ALEXNET = "alexnet"
EXTERNAL_SPEC = "podscale.pytorch.models.external_spec"
"""Module that derives the entry of a model from elsewhere, loaded when such a model is asked for."""


def model_spec(model: ModelSection, classes: int) -> ModelSpec:
    """Return the catalogue entry of a model; raises InputError if a model from elsewhere cannot be built."""
    if model.is_external:
        if find_spec("torch") is None:
            hint = "Run `pip install 'podscale[torch]'`, or use an image that has it."
            raise InputError("needs torch, which is not installed", field="model.name", got=model.name, hint=hint)
        engine: Any = import_module(EXTERNAL_SPEC)
        spec: ModelSpec = engine.external_spec(model, classes)
        return spec
    return layered_spec(model, classes)


def layered_spec(model: ModelSection, classes: int) -> LayeredSpec:
    """Return the layers of a network of the catalogue."""
    family = inception if model.name in inception.INCEPTION_NAMES else alexnet if model.name == ALEXNET else resnet
    layers = tuple(family.layers(model, classes))
    parameters = tuple(parameter for layer in layers for parameter in layer.parameters)
    buffers = tuple(buffer for layer in layers for buffer in layer.buffers)
    return LayeredSpec(model.name, classes, parameters, buffers, layers)


__all__ = [
    "ALEXNET",
    "HALVING_WINDOW",
    "BufferSpec",
    "LayerSpec",
    "LayeredSpec",
    "ModelSpec",
    "Normalisation",
    "ParamSpec",
    "Role",
    "Shape",
    "Window",
    "WindowPath",
    "alexnet",
    "inception",
    "layered_spec",
    "model_spec",
    "resnet",
]
