"""Residual networks 18 to 152 (He 2015), the bottleneck in version 1.5: it strides in its 3x3 convolution.

Modules carry the catalogue's names, which are torchvision's, so weights travel in both directions.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from podscale.config import ModelSection
from podscale.models import BASIC, BOTTLENECK, EXPANSION, RESNETS
from podscale.pytorch.batchnorm import BatchNorm
from podscale.pytorch.models.stem import Stem

Norm = Callable[[int], nn.Module]


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution as residual networks use it: same padding, no bias (batch norm brings one)."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut."""

    expansion = EXPANSION[BASIC]

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

    expansion = EXPANSION[BOTTLENECK]

    def __init__(self, inputs: int, inner: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = inner * self.expansion
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


Block = type[BasicBlock] | type[Bottleneck]


def stage(block: Block, inputs: int, inner: int, depth: int, stride: int, norm: Norm) -> nn.Sequential:
    """`depth` blocks; the first one halves the image where stride is 2."""
    first = block(inputs, inner, stride, norm)
    rest = [block(inner * block.expansion, inner, 1, norm) for _ in range(depth - 1)]
    return nn.Sequential(first, *rest)


class ResNet(nn.Module):
    """images float [n, 3, height, width] -> logits [n, classes]."""

    def __init__(
        self,
        block: Block,
        depths: tuple[int, int, int, int],
        classes: int,
        norm: Norm,
        *,
        width: int = 64,
        small_stem: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = Stem(width, 3, 1, 1) if small_stem else Stem(width, 7, 2, 3)
        self.bn1 = norm(width)
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(block, width, width, depths[0], 1, norm)
        self.layer2 = stage(block, width * block.expansion, width * 2, depths[1], 2, norm)
        self.layer3 = stage(block, width * block.expansion * 2, width * 4, depths[2], 2, norm)
        self.layer4 = stage(block, width * block.expansion * 4, width * 8, depths[3], 2, norm)
        self.fc = nn.Linear(width * block.expansion * 8, classes)

    def regions(self) -> list[Callable[[Tensor], Tensor]]:
        """The network as functions to call one after the other."""
        return [self.begin, self.layer1, self.layer2, self.layer3, self.layer4, self.classify]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.begin(x)))))
        return self.classify(x)

    def begin(self, x: Tensor) -> Tensor:
        return self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))  # type: ignore[no-any-return]

    def classify(self, x: Tensor) -> Tensor:
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
