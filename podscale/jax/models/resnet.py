"""Residual networks 18 to 152 and the CIFAR family (He 2015); the bottleneck, version 1.5, strides in its 3x3."""

from abc import ABC, abstractmethod

import jax.numpy as jnp
from jax import Array, nn

from podscale.config import ModelSection
from podscale.jax.models.layers import LayerApplier
from podscale.models.resnet import BASIC, BOTTLENECK, EXPANSION, ResNetSpec, resnet_spec


def resnet(layers: LayerApplier, images: Array, model: ModelSection) -> Array:
    """Return logits fp32 [n, classes] of float `images` [n, height, width, 3]."""
    network = resnet_spec(model)
    x = layers.stem("conv1", images, stride=network.stem.stride, padding=network.stem.padding)
    x = nn.relu(layers.norm("bn1", x))
    if not network.small_stem:
        x = layers.max_pool(x, 3, stride=2, padding=1)
    block = BLOCKS[network.block](layers, network)
    for stage, depth in enumerate(network.depths, start=1):
        for number in range(depth):
            stride = 2 if stage > 1 and number == 0 else 1
            x = block(f"layer{stage}.{number}", x, network.channels * 2 ** (stage - 1), stride)
    return layers.linear("fc", layers.global_average_pool(x))


class ResidualBlock(ABC):
    def __init__(self, layers: LayerApplier, spec: ResNetSpec) -> None:
        self.layers, self.spec = layers, spec

    @abstractmethod
    def __call__(self, name: str, x: Array, inner: int, stride: int) -> Array: ...

    def conv(self, name: str, norm: str, x: Array, stride: int = 1) -> Array:
        """Apply a convolution to images `x`, blurred if the spec blurs them, and its batch norm."""
        if self.spec.uses_blur(x.shape[-1], stride):
            x = self.layers.blur(x)
        return self.layers.norm(norm, self.layers.convolution(name, x, stride=stride))

    def shortcut(self, name: str, x: Array, outputs: int, stride: int) -> Array:
        """Return images `x` if shapes agree, else the spec's projection or padding of them."""
        if stride == 1 and x.shape[-1] == outputs:
            return x
        if self.spec.shortcut == "padding":
            more = outputs - x.shape[-1]
            return jnp.pad(self.layers.subsample(x, stride), ((0, 0), (0, 0), (0, 0), (0, more)))
        return self.conv(f"{name}.downsample.0", f"{name}.downsample.1", x, stride)


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions and the shortcut."""

    def __call__(self, name: str, x: Array, inner: int, stride: int) -> Array:
        y = nn.relu(self.conv(f"{name}.conv1", f"{name}.bn1", x, stride))
        y = self.conv(f"{name}.conv2", f"{name}.bn2", y)
        return nn.relu(y + self.shortcut(name, x, inner * EXPANSION[BASIC], stride))


class Bottleneck(ResidualBlock):
    """1x1 down, 3x3 (with the stride), 1x1 up to four times the inner channels, and the shortcut."""

    def __call__(self, name: str, x: Array, inner: int, stride: int) -> Array:
        y = nn.relu(self.conv(f"{name}.conv1", f"{name}.bn1", x))
        y = nn.relu(self.conv(f"{name}.conv2", f"{name}.bn2", y, stride))
        y = self.conv(f"{name}.conv3", f"{name}.bn3", y)
        return nn.relu(y + self.shortcut(name, x, inner * EXPANSION[BOTTLENECK], stride))


BLOCKS = {BASIC: BasicBlock, BOTTLENECK: Bottleneck}
