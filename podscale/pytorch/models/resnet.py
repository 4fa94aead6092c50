"""Residual networks 18 to 152 and the CIFAR family 20 to 110 (He 2015), with blur pooling (Zhang 2019) on request.

The bottleneck is that of version 1.5, which strides in its 3x3 convolution. Modules have torchvision's names, so
weights can be loaded in both directions. Blur pooling blurs images before a strided convolution (anti-aliasing).

Pre-activated networks (`model.block: v2`) are those of TensorFlow's official models. Their first convolution has no
batch norm. The first block of a stage activates its input before the shortcut, which projects without batch norm.
The other shortcuts are identities. torchvision has no such networks, so the names follow the same scheme: bn1 is before
conv1, and bn_last before the classifier.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podscale.config import ModelSection
from podscale.models.resnet import BASIC, BOTTLENECK, EXPANSION, ResNetSpec, resnet_spec
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.batch_norm.activations import (
    Fork,
    PendingSum,
    Projection,
    begin_block,
    convolve,
    norm_add_relu,
    norm_relu,
    norm_relu_convolve,
    norm_relu_pool,
    split_fork,
)
from podscale.pytorch.models.stem import Stem

NormFactory = Callable[[int], nn.Module]


def resnet(model: ModelSection, classes: int) -> "ResNet":
    def norm(channels: int) -> nn.Module:
        return BatchNorm(channels, eps=model.batch_norm.eps, momentum=model.batch_norm.momentum)

    network = ResNet(resnet_spec(model), classes, norm, model.stochastic_depth)
    initialise(network, model.zero_init_last_gamma)
    return network


class ResNet(nn.Module):
    """Images float [n, 3, height, width] -> logits [n, classes]."""

    bn_last: nn.Module

    def __init__(self, spec: ResNetSpec, classes: int, norm: NormFactory, depth_rate: float = 0.0) -> None:
        super().__init__()
        builder, channels = BlockBuilder(spec, norm, depth_rate), spec.channels
        self.conv1 = Stem(channels, *spec.stem)
        self.is_preactivated = spec.is_preactivated
        if not self.is_preactivated:
            self.bn1 = norm(channels)
        self.maxpool = nn.Identity() if spec.small_stem else nn.MaxPool2d(3, stride=2, padding=1)
        self.stages = [f"layer{number}" for number, _ in enumerate(spec.depths, start=1)]
        inputs = channels
        for number, (name, depth) in enumerate(zip(self.stages, spec.depths, strict=True)):
            inner = channels * 2**number
            self.add_module(name, builder.build_stage(inputs, inner, depth, 2 if number else 1))
            inputs = inner * EXPANSION[spec.block]
        if self.is_preactivated:
            self.bn_last = norm(inputs)
        self.fc = nn.Linear(inputs, classes)

    def regions(self) -> list[Callable[[Any], Any]]:
        """Return the network as functions to call in order. Between them are images, a `Fork` or a `PendingSum`."""
        return [self.forward_stem, *(getattr(self, name) for name in self.stages), self.forward_head]

    def forward(self, x: Tensor) -> Tensor:
        for region in self.regions():
            x = region(x)
        return x

    def forward_stem(self, x: Tensor) -> Tensor | Fork:
        x = self.conv1(x)
        if self.is_preactivated:
            return self.maxpool(x)  # type: ignore[no-any-return]
        return norm_relu_pool(self.bn1, self.maxpool, x)

    def forward_head(self, x: Tensor | Fork | PendingSum) -> Tensor:
        features, _ = split_fork(x)
        if self.is_preactivated:
            features = norm_relu(self.bn_last, features)
        return self.fc(features.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def initialise(network: nn.Module, zero_init_last_gamma: bool) -> None:
    """Initialise by He's fan-out; the last gamma of a block is 0 and the classifier N(0, 0.01) (Goyal 2017, 5.1).

    The branch of a pre-activated block ends in a convolution, whose weights are 0 instead: with a gamma of 0 before the
    last ReLU, no parameter of the branch would have a gradient.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
    for module in network.modules() if zero_init_last_gamma else ():  # after all convolutions are initialised
        if name := LAST_LAYERS.get(type(module)):
            nn.init.zeros_(module.get_parameter(f"{name}.weight"))


class BlockBuilder:
    """Builder of the blocks of one network and of the modules that they share."""

    def __init__(self, spec: ResNetSpec, norm: NormFactory, depth_rate: float) -> None:
        self.spec, self.norm, self.depth_rate = spec, norm, depth_rate
        self._blocks = 0

    def build_conv(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        """Build a convolution with same padding and without bias (batch norm has one)."""
        kind = BlurredConv if self.spec.uses_blur(inputs, stride) else nn.Conv2d
        return kind(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)

    def build_shortcut(self, inputs: int, outputs: int, stride: int, *, is_first: bool) -> nn.Module:
        """Build the identity, or the shortcut of the spec if shapes differ; `is_first` in its stage."""
        if not self.spec.changes_shortcut(inputs, outputs, stride, is_first=is_first):
            return nn.Identity()
        if self.spec.shortcut == "padding":
            return PaddedShortcut(stride, outputs - inputs)
        conv = self.build_conv(inputs, outputs, 1, stride)
        return nn.Sequential(conv) if self.spec.is_preactivated else Projection(conv, self.norm(outputs))

    def build_drop_path(self) -> nn.Module:
        """Build the stochastic depth of the next block, whose rate grows with depth."""
        rate = self.depth_rate * self._blocks / max(sum(self.spec.depths) - 1, 1)
        self._blocks += 1
        return DropPath(rate) if rate else nn.Identity()

    def build_stage(self, inputs: int, inner: int, depth: int, stride: int) -> nn.Sequential:
        """Build `depth` blocks, of which the first one strides."""
        outputs = inner * EXPANSION[self.spec.block]
        block = BLOCKS[self.spec.block, self.spec.is_preactivated]
        first = block(inputs, inner, stride, self, is_first=True)
        return nn.Sequential(first, *(block(outputs, inner, 1, self, is_first=False) for _ in range(depth - 1)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int, builder: BlockBuilder, *, is_first: bool) -> None:
        super().__init__()
        self.conv1 = builder.build_conv(inputs, inner, 3, stride)
        self.bn1 = builder.norm(inner)
        self.conv2 = builder.build_conv(inner, inner, 3)
        self.bn2 = builder.norm(inner)
        self.branch = builder.build_drop_path()
        self.downsample = builder.build_shortcut(inputs, inner, stride, is_first=is_first)

    def forward(self, x: Tensor | Fork | PendingSum) -> Tensor | Fork | PendingSum:
        x, shortcut = split_fork(x)
        y = norm_relu(self.bn1, self.conv1(x))
        return norm_add_relu(self.bn2, self.branch, self.conv2(y), self.downsample(shortcut))


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (with the stride), 1x1 up to four times the inner channels, and the shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int, builder: BlockBuilder, *, is_first: bool) -> None:
        super().__init__()
        outputs = inner * EXPANSION[builder.spec.block]
        self.conv1 = builder.build_conv(inputs, inner, 1)
        self.bn1 = builder.norm(inner)
        self.conv2 = builder.build_conv(inner, inner, 3, stride)
        self.bn2 = builder.norm(inner)
        self.conv3 = builder.build_conv(inner, outputs, 1)
        self.bn3 = builder.norm(outputs)
        self.branch = builder.build_drop_path()
        self.downsample = builder.build_shortcut(inputs, outputs, stride, is_first=is_first)

    def forward(self, x: Tensor | Fork | PendingSum) -> Tensor | Fork | PendingSum:
        y, shortcut = begin_block(self.conv1, self.bn1, self.downsample, x)
        y = norm_relu_convolve(self.bn2, self.conv3, self.conv2(norm_relu(self.bn1, y)))
        return norm_add_relu(self.bn3, self.branch, y, shortcut)


class PreactivatedBlock(nn.Module, ABC):
    """Block of He 2016: batch norm and ReLU before each convolution, and nothing after the sum.

    The first block of a stage activates its input before it splits into branch and shortcut; in the others the shortcut
    is the input itself.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, builder: BlockBuilder, *, is_first: bool) -> None:
        super().__init__()
        self.activates_shortcut = is_first
        self.bn1 = builder.norm(inputs)
        self.branch = builder.build_drop_path()
        self.downsample = builder.build_shortcut(inputs, outputs, stride, is_first=is_first)

    @abstractmethod
    def forward_branch(self, y: Tensor) -> Tensor:
        """Map the activated input `y` [n, channels, height, width] to the branch's output."""

    def forward(self, x: Tensor) -> Tensor:
        y = norm_relu(self.bn1, x)
        shortcut = self.downsample(y if self.activates_shortcut else x)
        return self.branch(self.forward_branch(y)) + shortcut  # type: ignore[no-any-return]


class PreactivatedBasicBlock(PreactivatedBlock):
    """Two 3x3 convolutions and the shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int, builder: BlockBuilder, *, is_first: bool) -> None:
        super().__init__(inputs, inner, stride, builder, is_first=is_first)
        self.conv1 = builder.build_conv(inputs, inner, 3, stride)
        self.bn2 = builder.norm(inner)
        self.conv2 = builder.build_conv(inner, inner, 3)

    def forward_branch(self, y: Tensor) -> Tensor:
        y = norm_relu(self.bn2, self.conv1(y))
        return self.conv2(y)  # type: ignore[no-any-return]


class PreactivatedBottleneck(PreactivatedBlock):
    """1x1 down, 3x3 (with the stride), 1x1 up to four times the inner channels, and the shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int, builder: BlockBuilder, *, is_first: bool) -> None:
        outputs = inner * EXPANSION[builder.spec.block]
        super().__init__(inputs, outputs, stride, builder, is_first=is_first)
        self.conv1 = builder.build_conv(inputs, inner, 1)
        self.bn2 = builder.norm(inner)
        self.conv2 = builder.build_conv(inner, inner, 3, stride)
        self.bn3 = builder.norm(inner)
        self.conv3 = builder.build_conv(inner, outputs, 1)

    def forward_branch(self, y: Tensor) -> Tensor:
        y = norm_relu(self.bn2, convolve(self.conv1, self.bn2, y))
        return norm_relu_convolve(self.bn3, self.conv3, self.conv2(y)).images


Block = BasicBlock | Bottleneck | PreactivatedBasicBlock | PreactivatedBottleneck
BLOCKS: dict[tuple[str, bool], type[Block]] = {
    (BASIC, False): BasicBlock,
    (BOTTLENECK, False): Bottleneck,
    (BASIC, True): PreactivatedBasicBlock,
    (BOTTLENECK, True): PreactivatedBottleneck,
}
"""Blocks by kind, and by whether the network is pre-activated."""
LAST_LAYERS: dict[type[nn.Module], str] = {
    BasicBlock: "bn2",
    Bottleneck: "bn3",
    PreactivatedBasicBlock: "conv2",
    PreactivatedBottleneck: "conv3",
}
"""Last layer of a block's branch."""


class BlurredConv(nn.Conv2d):
    """Convolution of blurred images. Same parameters, so weights fit networks with and without blur."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(blur(x))


def blur(x: Tensor) -> Tensor:
    """Filter each channel of `x` [n, channels, height, width] with [1, 2, 1] / 4 in both directions, zero-padded."""
    line = x.new_full((3,), 0.25)  # filled on the device: a CUDA graph cannot hold a copy from the host
    line[1].fill_(0.5)
    kernel = torch.outer(line, line).expand(x.shape[1], 1, 3, 3)
    return F.conv2d(x, kernel, padding=1, groups=x.shape[1])


class PaddedShortcut(nn.Module):
    """Every `stride`-th pixel, followed by `extra` channels of zeros (He 2015, option A)."""

    def __init__(self, stride: int, extra: int) -> None:
        super().__init__()
        self.stride, self.extra = stride, extra

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))


class DropPath(nn.Module):
    """Stochastic depth (Huang 2016): drop an image's branch with probability `rate`, else divide it by 1 - `rate`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.dropout = rate

    def forward(self, y: Tensor) -> Tensor:
        return y * F.dropout(y.new_ones(len(y), 1, 1, 1), self.dropout, self.training)
