"""Anti-aliased striding (Zhang 2019): images are blurred before a convolution leaves out pixels."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BlurredConv(nn.Conv2d):
    """A convolution of blurred images: each channel with [1, 2, 1] / 4 along both directions, zeros outside.

    Its parameters are those of the convolution alone, so weights fit networks with and without blur.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(blur(x))


def blur(x: Tensor) -> Tensor:
    """[n, channels, height, width] -> the same shape."""
    line = x.new_full((3,), 0.25)  # filled on the device: a CUDA graph cannot hold a copy from the host
    line[1].fill_(0.5)
    kernel = torch.outer(line, line).expand(x.shape[1], 1, 3, 3)
    return F.conv2d(x, kernel, padding=1, groups=x.shape[1])
