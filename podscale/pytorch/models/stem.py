"""First convolution of a network, computed in one of three ways; parameters and result are the same.

Three input channels leave a GPU's or TPU's matrix units mostly idle. `padded4` adds a fourth channel of zeros to images
and filters (MLPerf's MXNet submissions have four channels). `space_to_depth` folds blocks of stride x stride pixels
into channels, and the filters with them, so that the stride becomes 1 (MLPerf's TPU submissions, Kumar 2019): 7x7 with
stride 2 on 3 channels becomes 4x4 on 12. Both only add products with zeros.
"""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from podscale.models import LayerSpec

StemCompute = Literal["plain", "padded4", "space_to_depth"]


class Stem(nn.Conv2d):
    """Convolution of images: float [n, 3, height, width] -> [n, outputs, ...]; `compute` may change at any time."""

    def __init__(self, outputs: int, kernel: int, stride: int, padding: int, *, bias: bool = False) -> None:
        super().__init__(3, outputs, kernel, stride, padding, bias=bias)
        self.compute: StemCompute = "plain"

    def forward(self, x: Tensor) -> Tensor:
        match self.compute:
            case "plain":
                return super().forward(x)
            case "padded4":
                weight = F.pad(self.weight, (0, 0, 0, 0, 0, 1))
                return F.conv2d(F.pad(x, (0, 0, 0, 0, 0, 1)), weight, self.bias, self.stride, self.padding)
            case "space_to_depth":
                return self._space_to_depth_conv(x)

    def _space_to_depth_conv(self, x: Tensor) -> Tensor:
        """Pad the kernel to whole blocks, and the image so that each output begins with a block.

        If the plain convolution skips the image's last rows, the padding after them is negative.
        """
        stride, padding, kernel = self.stride[0], int(self.padding[0]), self.kernel_size[0]
        blocks = -(-kernel // stride)
        zeros = blocks * stride - kernel
        weight = space_to_depth(F.pad(self.weight, (0, zeros, 0, zeros)), stride)
        bottom, right = (
            ((side + 2 * padding - kernel) // stride + blocks) * stride - padding - side for side in x.shape[-2:]
        )
        return F.conv2d(space_to_depth(F.pad(x, (padding, right, padding, bottom)), stride), weight, self.bias)


def build_layer(layer: LayerSpec) -> nn.Module:
    """Build a layer of the model spec. A convolution of images is a stem."""
    inputs, outputs = layer.in_channels, layer.out_channels
    if layer.kind == "linear":
        return nn.Linear(inputs, outputs)
    if inputs == 3:
        return Stem(outputs, layer.kernel[0], layer.stride, layer.padding[0], bias=layer.bias)
    return nn.Conv2d(inputs, outputs, layer.kernel, layer.stride, layer.padding, groups=layer.groups, bias=layer.bias)


def space_to_depth(x: Tensor, block: int) -> Tensor:
    """Fold pixels of `x`: [n, c, h, w] -> [n, c * block^2, h / block, w / block], one copy in NHWC order."""
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // block, block, w // block, block).permute(0, 2, 4, 1, 3, 5)
    return parts.reshape(n, h // block, w // block, c * block * block).permute(0, 3, 1, 2)


def set_stem_compute(model: nn.Module, compute: StemCompute) -> None:
    """Set how the first convolution of `model` is computed. A stem of stride 1 cannot be folded and stays plain."""
    for module in model.modules():
        if isinstance(module, Stem):
            can_fold = module.stride[0] > 1
            module.compute = compute if compute != "space_to_depth" or can_fold else "plain"
