"""The catalogue of models: canonical names, shapes and roles of everything a network owns, and what it costs.

Engines define the layers; the catalogue says what they are called. A checkpoint, an optimizer's skip list and the
planner go by these names, so they hold for every engine. Shapes are torchvision's: convolutions are OIHW, linear
layers (out, in); so are the names of residual networks. AlexNet has names of its own, because torchvision numbers its
layers and batch norm would shift the numbers. Nothing here imports a framework.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Literal, NamedTuple

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

ALEXNET = "alexnet"
ALEXNET_CONVOLUTIONS, ALEXNET_HIDDEN = (96, 256, 384, 384, 256), 4096
"""Output channels of conv1 to conv5, units of fc6 and fc7 (Krizhevsky 2012, section 3.5)."""
ALEXNET_KERNELS = (11, 5, 3, 3, 3)
ALEXNET_GROUPED, ALEXNET_POOLED = (2, 4, 5), (1, 2, 5)
"""Convolutions that see their own tower alone, and those that an overlapping max-pool follows."""
ALEXNET_CELLS = 6
"""Side of what fc6 sees, in pixels: pool5's output for an image of 224."""


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


class Window(NamedTuple):
    """A convolution or pooling that changes the side of an image, in pixels."""

    kernel: int
    stride: int
    padding: int

    def side(self, before: int) -> int:
        return (before + 2 * self.padding - self.kernel) // self.stride + 1


HALVE = Window(1, 2, 0)
"""What every stride of 2 with same padding does to a side, whatever its kernel: half, rounded up."""
ALEXNET_FIRST, ALEXNET_POOL = Window(11, 4, 2), Window(3, 2, 0)

Path = tuple[Window, ...]


@dataclass(frozen=True)
class Layer:
    """One thing with parameters: a convolution, a linear layer, or a batch norm that stands alone.

    norm: name of the batch norm that follows, "" where none does. path: the windows between the image and this
    layer's output, in order, without those that leave the side as it is.
    """

    name: str
    kind: Literal["convolution", "linear", "norm"]
    inputs: int
    outputs: int
    kernel: int = 1
    groups: int = 1
    bias: bool = False
    norm: str = ""
    path: Path = ()

    def pixels(self, image_size: int) -> int:
        """Positions of the output for an image of this side; 1 for a linear layer."""
        if self.kind == "linear":
            return 1
        side = reduce(lambda before, window: window.side(before), self.path, image_size)
        return side * side

    def multiplications(self, image_size: int) -> int:
        """Multiply-adds of one image's forward pass; batch norm is not counted, as the field does not."""
        if self.kind == "norm":
            return 0
        return self.inputs // self.groups * self.outputs * self.kernel**2 * self.pixels(image_size)


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
        """Floating-point operations of one image's forward pass, 2 per multiply-add.

        Counts convolutions and linear layers, as the field does; `image_size` is the side in pixels.
        """
        return 2 * sum(layer.multiplications(image_size) for layer in self.layers)

    def training_flops(self, image_size: int) -> int:
        """Those of forward and backward: backward is two more passes, but nobody needs the gradient of the pixels."""
        return 3 * self.flops(image_size) - 2 * self.layers[0].multiplications(image_size)

    def activations(self, image_size: int) -> int:
        """Elements of all layers' outputs of one image: what sets the memory and the traffic of training."""
        return sum(layer.outputs * layer.pixels(image_size) for layer in self.layers if layer.kind != "norm")


def spec(model: ModelSection, classes: int) -> ModelSpec:
    """The catalogue entry of a document's model section for a number of classes."""
    layers = tuple(_alexnet_layers(model, classes) if model.name == ALEXNET else _resnet_layers(model, classes))
    norms = [(layer.norm or layer.name, layer.outputs) for layer in layers if layer.norm or layer.kind == "norm"]
    return ModelSpec(
        model.name,
        layers,
        tuple(parameter for layer in layers for parameter in _parameters(layer)),
        tuple(
            Buffer(f"{name}.{statistic}", (channels,))
            for name, channels in norms
            for statistic in ("running_mean", "running_var")
        ),
    )


def _parameters(layer: Layer) -> Iterator[Parameter]:
    if layer.kind == "linear":
        yield Parameter(f"{layer.name}.weight", (layer.outputs, layer.inputs), "weight")
    elif layer.kind == "convolution":
        shape = (layer.outputs, layer.inputs // layer.groups, layer.kernel, layer.kernel)
        yield Parameter(f"{layer.name}.weight", shape, "weight")
    if layer.bias:
        yield Parameter(f"{layer.name}.bias", (layer.outputs,), "bias")
    if norm := layer.name if layer.kind == "norm" else layer.norm:
        yield Parameter(f"{norm}.weight", (layer.outputs,), "norm")
        yield Parameter(f"{norm}.bias", (layer.outputs,), "norm")


def _resnet_layers(model: ModelSection, classes: int) -> Iterator[Layer]:
    """He 2015; the bottleneck strides in its 3x3 convolution (version 1.5, Goyal 2017)."""
    block, depths = RESNETS[model.name]
    imagenet = model.stem == "imagenet"
    halves: Path = (HALVE,) if imagenet else ()
    yield Layer("conv1", "convolution", 3, model.width, 7 if imagenet else 3, norm="bn1", path=halves)
    channels, path = model.width, halves + halves  # the max-pool halves too
    for stage, depth in enumerate(depths):
        inner = model.width * 2**stage
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            yield from _block(f"layer{stage + 1}.{number}", block, channels, inner, path, stride)
            channels, path = inner * EXPANSION[block], _strided(path, stride)
    yield Layer("fc", "linear", channels, classes, bias=True)


def _block(name: str, block: str, channels: int, inner: int, path: Path, stride: int) -> Iterator[Layer]:
    after = _strided(path, stride)
    outputs = inner * EXPANSION[block]

    def convolution(part: str, inputs: int, outputs: int, kernel: int, path: Path, norm: str) -> Layer:
        return Layer(f"{name}.{part}", "convolution", inputs, outputs, kernel, norm=f"{name}.{norm}", path=path)

    if block == BASIC:
        yield convolution("conv1", channels, inner, 3, after, "bn1")
        yield convolution("conv2", inner, inner, 3, after, "bn2")
    else:
        yield convolution("conv1", channels, inner, 1, path, "bn1")
        yield convolution("conv2", inner, inner, 3, after, "bn2")
        yield convolution("conv3", inner, outputs, 1, after, "bn3")
    if stride != 1 or channels != outputs:
        yield convolution("downsample.0", channels, outputs, 1, after, "downsample.1")


def _strided(path: Path, stride: int) -> Path:
    return (*path, HALVE) if stride == 2 else path


def alexnet_channels(model: ModelSection) -> tuple[tuple[int, ...], int]:
    """Output channels of the five convolutions, and units of the two hidden linear layers, at the section's width."""
    scaled = [size * model.width // 64 for size in (*ALEXNET_CONVOLUTIONS, ALEXNET_HIDDEN)]
    return tuple(scaled[:-1]), scaled[-1]


def _alexnet_layers(model: ModelSection, classes: int) -> Iterator[Layer]:
    """Krizhevsky 2012, section 3.5 and figure 2; the options' sources stand in `config.model.AlexNetSection`.

    In full width at 1000 classes: 60,965,224 parameters, 244 MB in fp32, with two groups and without batch norm
    (62,378,344 with whole convolutions). Padding follows torchvision's network: 224 px give 55 x 55 after conv1.
    """
    options, (channels, hidden) = model.alexnet, alexnet_channels(model)
    inputs = 3
    path: Path = (ALEXNET_FIRST,)
    for number, outputs in enumerate(channels, start=1):
        yield Layer(
            f"conv{number}",
            "convolution",
            inputs,
            outputs,
            ALEXNET_KERNELS[number - 1],
            groups=options.groups if number in ALEXNET_GROUPED else 1,
            bias=not options.convolution_norm,
            norm=f"bn{number}" if options.convolution_norm else "",
            path=path,
        )
        inputs = outputs
        if number in ALEXNET_POOLED:
            path = (*path, ALEXNET_POOL)
    if options.pool5_norm:
        yield Layer("bn_pool5", "norm", inputs, inputs, path=path)
    yield Layer("fc6", "linear", inputs * ALEXNET_CELLS**2, hidden, bias=True)
    yield Layer("fc7", "linear", hidden, hidden, bias=True)
    yield Layer("fc8", "linear", hidden, classes, bias=True)
