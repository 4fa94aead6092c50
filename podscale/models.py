"""The catalogue of models: canonical names, shapes and roles of everything a network owns, and what it costs.

Engines define the layers; the catalogue says what they are called. A checkpoint, an optimizer's skip list and the
planner go by these names, so they hold for every engine. Names and shapes are torchvision's: convolutions are OIHW,
linear layers (out, in). Nothing here imports a framework.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from podscale.config import ModelSection

Role = Literal["weight", "bias", "norm"]
Shape = tuple[int, ...]

BASIC, BOTTLENECK = "basic", "bottleneck"
EXPANSION = {BASIC: 1, BOTTLENECK: 4}
"""Output channels of a block over its inner channels."""

RESNETS: dict[str, tuple[str, tuple[int, int, int, int]]] = {
    "resnet18": (BASIC, (2, 2, 2, 2)),
    "resnet34": (BASIC, (3, 4, 6, 3)),
    "resnet50": (BOTTLENECK, (3, 4, 6, 3)),
    "resnet101": (BOTTLENECK, (3, 4, 23, 3)),
    "resnet152": (BOTTLENECK, (3, 8, 36, 3)),
}
"""Kind of block and blocks per stage (He 2015, table 1)."""


@dataclass(frozen=True)
class Parameter:
    """One trained array. Weight decay and LARS scaling apply to the role `weight` alone."""

    name: str
    shape: Shape
    role: Role

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Buffer:
    """One array that is kept but not trained: a running statistic of batch norm."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Layer:
    """One convolution (kernel > 0, followed by batch norm) or the linear layer at the end (kernel 0).

    `halvings` counts the strides of 2 between the image and this layer's output.
    """

    name: str
    inputs: int
    outputs: int
    kernel: int
    halvings: int
    norm: str = ""


@dataclass(frozen=True)
class ModelSpec:
    """Everything about a network that does not depend on an engine."""

    name: str
    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]

    @property
    def size(self) -> int:
        """Number of trained scalars."""
        return sum(parameter.size for parameter in self.parameters)

    def flops(self, image_size: int) -> int:
        """Floating-point operations of one image's forward pass, 2 per multiply-add; training costs about 3 times it.

        Counts convolutions and the linear layer, as the field does; `image_size` is the side in pixels.
        """
        return sum(
            2 * layer.inputs * layer.outputs * max(layer.kernel, 1) ** 2 * _pixels(layer, image_size)
            for layer in self.layers
        )

    def activations(self, image_size: int) -> int:
        """Elements of all convolution outputs of one image: what sets the memory and the traffic of training."""
        return sum(layer.outputs * _pixels(layer, image_size) for layer in self.layers)


def spec(model: ModelSection, classes: int) -> ModelSpec:
    """The catalogue entry of a document's model section for a number of classes."""
    layers = tuple(_resnet_layers(model, classes))
    return ModelSpec(
        model.name,
        layers,
        tuple(parameter for layer in layers for parameter in _parameters(layer)),
        tuple(
            Buffer(f"{layer.norm}.{statistic}", (layer.outputs,))
            for layer in layers
            if layer.norm
            for statistic in ("running_mean", "running_var")
        ),
    )


def _pixels(layer: Layer, image_size: int) -> int:
    """Positions of a layer's output; each halving rounds up, as a padded stride of 2 does."""
    if layer.kernel == 0:
        return 1
    side: int = -(-image_size // 2**layer.halvings)
    return side * side


def _parameters(layer: Layer) -> Iterator[Parameter]:
    if layer.kernel == 0:
        yield Parameter(f"{layer.name}.weight", (layer.outputs, layer.inputs), "weight")
        yield Parameter(f"{layer.name}.bias", (layer.outputs,), "bias")
        return
    yield Parameter(f"{layer.name}.weight", (layer.outputs, layer.inputs, layer.kernel, layer.kernel), "weight")
    yield Parameter(f"{layer.norm}.weight", (layer.outputs,), "norm")
    yield Parameter(f"{layer.norm}.bias", (layer.outputs,), "norm")


def _resnet_layers(model: ModelSection, classes: int) -> Iterator[Layer]:
    """He 2015; the bottleneck strides in its 3x3 convolution (version 1.5, Goyal 2017)."""
    block, depths = RESNETS[model.name]
    imagenet = model.stem == "imagenet"
    yield Layer("conv1", 3, model.width, 7 if imagenet else 3, 1 if imagenet else 0, "bn1")
    channels, halvings = model.width, 2 if imagenet else 0
    for stage, depth in enumerate(depths):
        inner = model.width * 2**stage
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            yield from _block(f"layer{stage + 1}.{number}", block, channels, inner, halvings, stride)
            channels, halvings = inner * EXPANSION[block], halvings + (stride == 2)
    yield Layer("fc", channels, classes, 0, halvings)


def _block(name: str, block: str, channels: int, inner: int, halvings: int, stride: int) -> Iterator[Layer]:
    after = halvings + (stride == 2)
    outputs = inner * EXPANSION[block]
    if block == BASIC:
        yield Layer(f"{name}.conv1", channels, inner, 3, after, f"{name}.bn1")
        yield Layer(f"{name}.conv2", inner, inner, 3, after, f"{name}.bn2")
    else:
        yield Layer(f"{name}.conv1", channels, inner, 1, halvings, f"{name}.bn1")
        yield Layer(f"{name}.conv2", inner, inner, 3, after, f"{name}.bn2")
        yield Layer(f"{name}.conv3", inner, outputs, 1, after, f"{name}.bn3")
    if stride != 1 or channels != outputs:
        yield Layer(f"{name}.downsample.0", channels, outputs, 1, after, f"{name}.downsample.1")
