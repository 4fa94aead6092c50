"""Model specification: layers, parameters, FLOPs and activations of a network."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import prod
from typing import Literal, NamedTuple, Self

Role = Literal["weight", "bias", "norm_scale", "norm_bias", "embedding"]
"""Kind of a parameter. Embeddings are those of tokens and positions, and class tokens."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParamSpec:
    """One trained array. By default, weight decay and LARS scaling apply to the role `weight` alone."""

    name: str
    shape: Shape
    role: Role

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_norm(self) -> bool:
        """Return True for scale and bias of a normalisation layer."""
        return self.role in ("norm_scale", "norm_bias")


@dataclass(frozen=True)
class BufferSpec:
    """One array that is not trained: a running statistic of batch norm, or a frozen parameter."""

    name: str
    shape: Shape


class Window(NamedTuple):
    """A convolution or pooling that changes the side of an image, in pixels."""

    kernel: int
    stride: int
    padding: int

    def output_size(self, before: int) -> int:
        """Return the side of the output for an input of side `before`, in pixels."""
        return (before + 2 * self.padding - self.kernel) // self.stride + 1


HALVING_WINDOW = Window(1, 2, 0)
"""Window of stride 2 with same padding, for any kernel: half the side, rounded up."""

WindowPath = tuple[Window, ...]


def output_size(path: WindowPath, image_size: int) -> int:
    """Return the side of an image of side `image_size` after the windows, in pixels."""
    return reduce(lambda before, window: window.output_size(before), path, image_size)


@dataclass(frozen=True)
class LayerSpec:
    """A convolution, a linear layer, a batch norm without a convolution, or a fixed blur.

    Args:
        kernel: rows and columns.
        padding: rows and columns.
        norm: name of the batch norm that follows; "" if there is none.
        path: windows between the image and this output, in order, without those that keep the side.
        auxiliary: computed in training only.
    """

    name: str
    kind: Literal["convolution", "linear", "norm", "blur"]
    in_channels: int
    out_channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    groups: int = 1
    bias: bool = False
    norm: str = ""
    path: WindowPath = ()
    auxiliary: bool = False

    def output_pixels(self, image_size: int) -> int:
        """Return the number of output pixels for an image of side `image_size`; 1 for a linear layer."""
        return 1 if self.kind == "linear" else output_size(self.path, image_size) ** 2

    def multiply_adds(self, image_size: int) -> int:
        """Return the multiply-adds of the forward pass of one image of side `image_size`.

        Batch norm does not count, as is usual.
        """
        if self.kind == "norm":
            return 0
        return self.in_channels // self.groups * self.out_channels * prod(self.kernel) * self.output_pixels(image_size)

    @property
    def parameters(self) -> Iterator[ParamSpec]:
        if self.kind == "linear":
            yield ParamSpec(f"{self.name}.weight", (self.out_channels, self.in_channels), "weight")
        elif self.kind == "convolution":
            yield ParamSpec(
                f"{self.name}.weight", (self.out_channels, self.in_channels // self.groups, *self.kernel), "weight"
            )
        if self.bias:
            yield ParamSpec(f"{self.name}.bias", (self.out_channels,), "bias")
        if norm := self.norm_name:
            yield ParamSpec(f"{norm}.weight", (self.out_channels,), "norm_scale")
            yield ParamSpec(f"{norm}.bias", (self.out_channels,), "norm_bias")

    @property
    def buffers(self) -> Iterator[BufferSpec]:
        if norm := self.norm_name:
            yield BufferSpec(f"{norm}.running_mean", (self.out_channels,))
            yield BufferSpec(f"{norm}.running_var", (self.out_channels,))

    @property
    def norm_name(self) -> str:
        """Name of this layer's batch norm; "" if it has none."""
        return self.name if self.kind == "norm" else self.norm


class Normalisation(NamedTuple):
    """Mean and standard deviation of each channel, of values in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class ModelSpec(ABC):
    """Catalogue entry of a network: names, shapes and roles of its parameters, and its costs.

    `parameters` are trained. `published_input` is the normalisation that a library lists for its weights, if known.
    """

    name: str
    classes: int
    parameters: tuple[ParamSpec, ...]
    buffers: tuple[BufferSpec, ...]
    published_input: Normalisation | None = field(default=None, kw_only=True)

    @property
    def constants(self) -> frozenset[str]:
        """Names of arrays that the network builds itself, which published weights may hold too."""
        return frozenset()

    @cached_property
    def array_shapes(self) -> dict[str, Shape]:
        """Shapes of all parameters, then of all buffers, by name."""
        return {array.name: array.shape for arrays in (self.parameters, self.buffers) for array in arrays}

    @property
    def num_parameters(self) -> int:
        """Number of trained scalars."""
        return sum(parameter.size for parameter in self.parameters)

    def freeze(self, names: Collection[str]) -> Self:
        """Return the entry of the network with these parameters frozen."""
        trained = tuple(parameter for parameter in self.parameters if parameter.name not in names)
        frozen = (BufferSpec(each.name, each.shape) for each in self.parameters if each.name in names)
        return replace(self, parameters=trained, buffers=(*self.buffers, *frozen))

    @abstractmethod
    def flops(self, image_size: int) -> int:
        """Return the FLOPs of the forward pass of one image of side `image_size`, 2 per multiply-add."""

    @abstractmethod
    def training_flops(self, image_size: int) -> int:
        """Return the FLOPs of forward and backward of one image of side `image_size`."""

    @abstractmethod
    def saved_elements(self, image_size: int) -> int:
        """Return the elements that forward keeps for backward, for one image of side `image_size`.

        If most layers are frozen, they are at least those of its largest layer: its input and its output.
        """

    @abstractmethod
    def check_image_size(self, image_size: int) -> None:
        """Raise InputError if the network does not take images of side `image_size`."""


@dataclass(frozen=True)
class LayeredSpec(ModelSpec):
    """Specification of a network of the catalogue by its layers, the same for all engines."""

    layers: tuple[LayerSpec, ...]

    def flops(self, image_size: int) -> int:
        """Return the FLOPs of the forward pass of one image of side `image_size`, 2 per multiply-add.

        Counts convolutions, linear layers and blurs, without auxiliary layers, as is usual.
        """
        return 2 * sum(layer.multiply_adds(image_size) for layer in self.layers if not layer.auxiliary)

    def training_flops(self, image_size: int) -> int:
        """Return the FLOPs of forward and backward of one image of side `image_size`, auxiliary layers included.

        Backward is one more pass for the weights that are trained, and one for the inputs of the layers after the first
        trained one. The gradient of the image is not computed.
        """
        trained, first = self._trained_names, self._first_trained
        forward = [layer.multiply_adds(image_size) for layer in self.layers]
        weights = [cost for layer, cost in zip(self.layers, forward, strict=True) if f"{layer.name}.weight" in trained]
        return 2 * (sum(forward) + sum(weights) + sum(forward[first + 1 :]))

    def saved_elements(self, image_size: int) -> int:
        """Return twice the elements of the layers' outputs, from the first trained layer on.

        Those are the outputs of convolutions, and of their norms; of the layers before, those of the largest one count.
        """
        outputs = [  # 0 for a norm, whose output has the elements of the layer before
            0 if layer.kind == "norm" else layer.out_channels * layer.output_pixels(image_size) for layer in self.layers
        ]
        return 2 * max(sum(outputs[self._first_trained :]), *outputs)

    def check_image_size(self, image_size: int) -> None:
        """Accept the size, which the document's own checks have compared with the network."""

    @cached_property
    def _trained_names(self) -> frozenset[str]:
        return frozenset(parameter.name for parameter in self.parameters)

    @cached_property
    def _first_trained(self) -> int:
        """Index of the first layer with a trained parameter."""
        indices = (
            index
            for index, layer in enumerate(self.layers)
            if any(parameter.name in self._trained_names for parameter in layer.parameters)
        )
        return next(indices)
