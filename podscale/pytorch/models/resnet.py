"""Residual networks 18 to 152 (He 2015), the bottleneck in version 1.5: it strides in its 3x3 convolution.

Modules carry the catalogue's names, which are torchvision's, so weights travel in both directions.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from podscale.config import ModelSection
from podscale.models import BOTTLENECK, EXPANSION, RESNETS
from podscale.pytorch.batchnorm import BatchNorm

Norm = Callable[[int], nn.Module]


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution as residual networks use it: same padding, no bias (batch norm brings one)."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = conv(inputs, inner, 3, stride)
        self.bn1 = norm(inner)
        self.conv2 = conv(inner, inner, 3)
        self.bn2 = norm(inner)
        self.downsample = shortcut(inputs, inner, stride, norm)

    @property
    def last_norm(self) -> nn.Module:
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (with the stride), 1x1 up to four times the inner channels, and the shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = inner * EXPANSION[BOTTLENECK]
        self.conv1 = conv(inputs, inner, 1)
        self.bn1 = norm(inner)
        self.conv2 = conv(inner, inner, 3, stride)
        self.bn2 = norm(inner)
        self.conv3 = conv(inner, outputs, 1)
        self.bn3 = norm(outputs)
        self.downsample = shortcut(inputs, outputs, stride, norm)

    @property
    def last_norm(self) -> nn.Module:
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x), inplace=True)


def shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    """The identity where shapes agree, else a projection (He 2015, option B)."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(conv(inputs, outputs, 1, stride), norm(outputs))


class ResNet(nn.Module):
    """images float [n, 3, height, width] -> logits [n, classes]."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        classes: int,
        norm: Norm,
        *,
        width: int = 64,
        small_stem: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = conv(3, width, 3) if small_stem else conv(3, width, 7, stride=2)
        self.bn1 = norm(width)
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, stride=2, padding=1)
        expansion = 4 if block is Bottleneck else 1
        channels = width
        for stage, depth in enumerate(depths):
            inner = width * 2**stage
            blocks = []
            for number in range(depth):
                blocks.append(block(channels, inner, 2 if stage and not number else 1, norm))
                channels = inner * expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def initialise(network: nn.Module, zero_init_last_gamma: bool) -> None:
    """He's initialisation by fan-out; the last gamma of a block 0 and the classifier N(0, 0.01) (Goyal 2017, 5.1)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
        elif isinstance(module, BasicBlock | Bottleneck) and zero_init_last_gamma:
            nn.init.zeros_(module.last_norm.weight)  # type: ignore[arg-type]


def resnet(model: ModelSection, classes: int) -> ResNet:
    """The residual network of a document's model section."""
    kind, depths = RESNETS[model.name]

    def norm(channels: int) -> nn.Module:
        return BatchNorm(channels, eps=model.batch_norm.eps, momentum=model.batch_norm.momentum)

    block = Bottleneck if kind == BOTTLENECK else BasicBlock
    network = ResNet(block, depths, classes, norm, width=model.width, small_stem=model.stem == "small")
    initialise(network, model.zero_init_last_gamma)
    return network
