"""Residual networks 18 to 152 and the CIFAR family (He 2015), and their pre-activated form (He 2016).

The bottleneck, version 1.5, strides in its 3x3. `podscale.pytorch.models.resnet` describes the pre-activated networks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array, nn

from podscale.config import ModelSection
from podscale.jax.models.layers import LayerApplier
from podscale.models.resnet import BASIC, BOTTLENECK, EXPANSION, LAST_NORM, ResNetSpec, resnet_spec


def resnet(layers: LayerApplier, images: Array, model: ModelSection) -> Array:
    """Return logits fp32 [n, classes] of float `images` [n, height, width, 3]."""
    network = resnet_spec(model)
    x = layers.stem("conv1", images, stride=network.stem.stride, padding=network.stem.padding)
    if not network.is_preactivated:
        x = nn.relu(layers.norm("bn1", x))
    if not network.small_stem:
        x = layers.max_pool(x, 3, stride=2, padding=1)
    block = BLOCKS[network.block, network.is_preactivated](layers, network)
    for stage, depth in enumerate(network.depths, start=1):
        for number in range(depth):
            stride = 2 if stage > 1 and number == 0 else 1
            name, inner = f"layer{stage}.{number}", network.channels * 2 ** (stage - 1)
            x = block(name, x, inner, stride, is_first=number == 0)
    if network.is_preactivated:
        x = nn.relu(layers.norm(LAST_NORM, x))
    return layers.linear("fc", layers.global_average_pool(x))


class ResidualBlock(ABC):
    def __init__(self, layers: LayerApplier, spec: ResNetSpec) -> None:
        self.layers, self.spec = layers, spec

    @abstractmethod
    def __call__(self, name: str, x: Array, inner: int, stride: int, *, is_first: bool) -> Array:
        """Apply a block to images `x`; `is_first` in its stage."""

    def bare_conv(self, name: str, x: Array, stride: int = 1) -> Array:
        """Apply a convolution to images `x`, blurred if the spec blurs them."""
        if self.spec.uses_blur(x.shape[-1], stride):
            x = self.layers.blur(x)
        return self.layers.convolution(name, x, stride=stride)

    def conv(self, name: str, norm: str, x: Array, stride: int = 1) -> Array:
        """Apply a convolution to images `x`, blurred if the spec blurs them, and its batch norm."""
        return self.layers.norm(norm, self.bare_conv(name, x, stride))

    def shortcut(self, name: str, x: Array, outputs: int, stride: int, *, is_first: bool) -> Array:
        """Return images `x`, or the spec's projection or padding of them if shapes differ."""
        if not self.spec.changes_shortcut(x.shape[-1], outputs, stride, is_first=is_first):
            return x
        if self.spec.shortcut == "padding":
            more = outputs - x.shape[-1]
            return jnp.pad(self.layers.subsample(x, stride), ((0, 0), (0, 0), (0, 0), (0, more)))
        if self.spec.is_preactivated:
            return self.bare_conv(f"{name}.downsample.0", x, stride)
        return self.conv(f"{name}.downsample.0", f"{name}.downsample.1", x, stride)


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions and the shortcut."""

    def __call__(self, name: str, x: Array, inner: int, stride: int, *, is_first: bool) -> Array:
        y = nn.relu(self.conv(f"{name}.conv1", f"{name}.bn1", x, stride))
        y = self.conv(f"{name}.conv2", f"{name}.bn2", y)
        return nn.relu(y + self.shortcut(name, x, inner * EXPANSION[BASIC], stride, is_first=is_first))


class Bottleneck(ResidualBlock):
    """1x1 down, 3x3 (with the stride), 1x1 up to four times the inner channels, and the shortcut."""

    def __call__(self, name: str, x: Array, inner: int, stride: int, *, is_first: bool) -> Array:
        y = nn.relu(self.conv(f"{name}.conv1", f"{name}.bn1", x))
        y = nn.relu(self.conv(f"{name}.conv2", f"{name}.bn2", y, stride))
        y = self.conv(f"{name}.conv3", f"{name}.bn3", y)
        return nn.relu(y + self.shortcut(name, x, inner * EXPANSION[BOTTLENECK], stride, is_first=is_first))


class PreactivatedBlock(ResidualBlock):
    """Block of He 2016: batch norm and ReLU before each convolution, and nothing after the sum.

    The first block of a stage activates its input before it splits into branch and shortcut; in the others the shortcut
    is the input itself.
    """

    def __call__(self, name: str, x: Array, inner: int, stride: int, *, is_first: bool) -> Array:
        y = nn.relu(self.layers.norm(f"{name}.bn1", x))
        outputs = inner * EXPANSION[self.spec.block]
        shortcut = self.shortcut(name, y if is_first else x, outputs, stride, is_first=is_first)
        return self.branch(name, y, stride) + shortcut

    @abstractmethod
    def branch(self, name: str, y: Array, stride: int) -> Array:
        """Map the activated input `y` [n, height, width, channels] to the branch's output."""


class PreactivatedBasicBlock(PreactivatedBlock):
    """Two 3x3 convolutions and the shortcut."""

    def branch(self, name: str, y: Array, stride: int) -> Array:
        y = nn.relu(self.conv(f"{name}.conv1", f"{name}.bn2", y, stride))
        return self.bare_conv(f"{name}.conv2", y)


class PreactivatedBottleneck(PreactivatedBlock):
    """1x1 down, 3x3 (with the stride), 1x1 up to four times the inner channels, and the shortcut."""

    def branch(self, name: str, y: Array, stride: int) -> Array:
        y = nn.relu(self.conv(f"{name}.conv1", f"{name}.bn2", y))
        y = nn.relu(self.conv(f"{name}.conv2", f"{name}.bn3", y, stride))
        return self.bare_conv(f"{name}.conv3", y)


BLOCKS: Mapping[tuple[str, bool], Callable[[LayerApplier, ResNetSpec], ResidualBlock]] = {
    (BASIC, False): BasicBlock,
    (BOTTLENECK, False): Bottleneck,
    (BASIC, True): PreactivatedBasicBlock,
    (BOTTLENECK, True): PreactivatedBottleneck,
}
"""Blocks by kind, and by whether the network is pre-activated."""
