"""Layers of residual networks: those for ImageNet (18 to 152) and the CIFAR family (20 to 110), in both block orders.

Block v1 is that of He 2015, block v2 the pre-activation of He 2016 ("Identity Mappings in Deep Residual Networks").
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from podscale.config import ModelSection
from podscale.config.model import CIFAR_RESNETS
from podscale.models.spec import HALVING_WINDOW, LayerSpec, Window, WindowPath

BASIC, BOTTLENECK = "basic", "bottleneck"
EXPANSION = {BASIC: 1, BOTTLENECK: 4}
"""Output channels of a block over its inner channels."""

IMAGENET_BLOCKS: dict[str, tuple[str, tuple[int, ...]]] = {
    "resnet18": (BASIC, (2, 2, 2, 2)),
    "resnet34": (BASIC, (3, 4, 6, 3)),
    "resnet50": (BOTTLENECK, (3, 4, 6, 3)),
    "resnet101": (BOTTLENECK, (3, 4, 23, 3)),
    "resnet152": (BOTTLENECK, (3, 8, 36, 3)),
}
"""Kind of block and blocks per stage (He 2015, table 1)."""
CIFAR_BLOCKS = dict(zip(CIFAR_RESNETS, (3, 5, 7, 9, 18), strict=True))
"""Blocks in each of three stages of two 3x3 convolutions: 6 n + 2 layers (He 2015, section 4.2)."""
CIFAR_CHANNELS = 16
"""Channels of the first stage of the CIFAR family; the others have 64."""
LAST_NORM = "bn_last"
"""Batch norm between the last block and the classifier of a pre-activated network."""
MIN_BLURRED_CHANNELS = 16
"""Minimal input channels of a strided convolution with a blurred input: images themselves are not blurred."""


@dataclass(frozen=True)
class ResNetSpec:
    """Shape of a residual network.

    Args:
        depths: blocks per stage; each stage but the first halves the image and doubles the channels.
        channels: channels of the first stage, before expansion.
        shortcut: if shapes change, a projection (He 2015, option B) or every other pixel with zero channels appended
            (option A).
        blurpool: blur before striding.
        is_preactivated: blocks of He 2016, with batch norm and ReLU before each convolution (`model.block: v2`).
    """

    block: str
    depths: tuple[int, ...]
    channels: int
    small_stem: bool
    shortcut: Literal["projection", "padding"]
    blurpool: bool
    is_preactivated: bool = False

    @property
    def stem(self) -> Window:
        return Window(3, 1, 1) if self.small_stem else Window(7, 2, 3)

    def uses_blur(self, inputs: int, stride: int) -> bool:
        """Return True if a convolution with this number of input channels and this stride has a blurred input."""
        return self.blurpool and stride > 1 and inputs >= MIN_BLURRED_CHANNELS

    def changes_shortcut(self, inputs: int, outputs: int, stride: int, *, is_first: bool) -> bool:
        """Return True if a block's shortcut is not the identity; `is_first` in its stage.

        With pre-activation, each stage begins with a projection even if shapes agree, as in TensorFlow's official
        models.
        """
        projects = self.is_preactivated and is_first and self.shortcut == "projection"
        return projects or stride != 1 or inputs != outputs


def resnet_spec(model: ModelSection) -> ResNetSpec:
    is_v2, is_cifar = model.block == "v2", model.name in CIFAR_BLOCKS
    block, channels = BASIC, CIFAR_CHANNELS * model.width // 64
    depths: tuple[int, ...] = 3 * (CIFAR_BLOCKS.get(model.name, 0),)
    if not is_cifar:
        (block, depths), channels = IMAGENET_BLOCKS[model.name], model.width
    shortcut = model.shortcut or ("padding" if is_cifar and not is_v2 else "projection")
    return ResNetSpec(block, depths, channels, model.small_stem, shortcut, model.blurpool, is_v2)


def layers(model: ModelSection, classes: int) -> Iterator[LayerSpec]:
    """Yield the layers of He 2015, or of He 2016 with pre-activation.

    The bottleneck strides in its 3x3 convolution (version 1.5, Goyal 2017). Pre-activated networks have no batch norm
    after conv1, and a last one before the classifier, as in TensorFlow's official models.
    """
    network = resnet_spec(model)
    halves: WindowPath = () if network.small_stem else (HALVING_WINDOW,)
    yield _convolution("conv1", 3, network.channels, network.stem, "" if network.is_preactivated else "bn1", halves)
    channels, path = network.channels, halves + halves  # the max-pool halves too
    for stage, depth in enumerate(network.depths):
        inner = network.channels * 2**stage
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            yield from _block(
                f"layer{stage + 1}.{number}", network, channels, inner, path, stride, is_first=number == 0
            )
            channels, path = inner * EXPANSION[network.block], _strided(path, stride)
    if network.is_preactivated:
        yield LayerSpec(LAST_NORM, "norm", channels, channels, path=path)
    yield LayerSpec("fc", "linear", channels, classes, bias=True)


def _block(
    name: str, network: ResNetSpec, channels: int, inner: int, path: WindowPath, stride: int, *, is_first: bool
) -> Iterator[LayerSpec]:
    """Yield a block's layers. With pre-activation, the norm after a convolution belongs to the next convolution."""
    outputs = inner * EXPANSION[network.block]

    def convolution(
        part: str, inputs: int, outputs: int, kernel: int, path: WindowPath, norm: str, stride: int = 1
    ) -> Iterator[LayerSpec]:
        if network.uses_blur(inputs, stride):
            yield LayerSpec(f"{name}.{part}.blur", "blur", inputs, inputs, (3, 3), 1, (1, 1), inputs, path=path)
        window, after = Window(kernel, stride, kernel // 2), _strided(path, stride)
        yield _convolution(f"{name}.{part}", inputs, outputs, window, norm and f"{name}.{norm}", after)

    after = _strided(path, stride)
    if network.is_preactivated:
        yield LayerSpec(f"{name}.bn1", "norm", channels, channels, path=path)
        norms = ["bn2", "bn3", ""] if network.block == BOTTLENECK else ["bn2", ""]
    else:
        norms = ["bn1", "bn2", "bn3"]
    if network.block == BASIC:
        yield from convolution("conv1", channels, inner, 3, path, norms[0], stride)
        yield from convolution("conv2", inner, inner, 3, after, norms[1])
    else:
        yield from convolution("conv1", channels, inner, 1, path, norms[0])
        yield from convolution("conv2", inner, inner, 3, path, norms[1], stride)
        yield from convolution("conv3", inner, outputs, 1, after, norms[2])
    if network.shortcut == "projection" and network.changes_shortcut(channels, outputs, stride, is_first=is_first):
        norm = "" if network.is_preactivated else "downsample.1"
        yield from convolution("downsample.0", channels, outputs, 1, path, norm, stride)


def _convolution(name: str, inputs: int, outputs: int, window: Window, norm: str, path: WindowPath) -> LayerSpec:
    kernel, stride, padding = window
    square, around = (kernel, kernel), (padding, padding)
    return LayerSpec(name, "convolution", inputs, outputs, square, stride, around, norm=norm, path=path)


def _strided(path: WindowPath, stride: int) -> WindowPath:
    return (*path, HALVING_WINDOW) if stride == 2 else path
