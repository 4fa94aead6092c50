"""Comparison of the GEMM kernels with separate operations on the device at hand, before a training uses them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podscale.pytorch.batch_norm import gemm
from podscale.pytorch.batch_norm.block_values import PendingSum
from podscale.pytorch.batch_norm.layer import BatchNorm

CHANNELS = (64, 32)
"""Channels of a block's output and inside it."""
IMAGES = (3, CHANNELS[0], 10, 9)
TOLERATED_ERROR = 0.2
"""Largest relative error of a result in bf16, by its norm. Outputs differ by roundings, about 0.01; gradients by up to
0.1, because a rounding may change the sign of a ReLU's input."""


def largest_error(device: torch.device) -> float:
    """Return the largest relative error of outputs and gradients of two blocks in bf16; NaN if there is one."""
    ours, separate = (_results(device, run) for run in (_run_kernels, _run_separately))
    errors = torch.stack(
        [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(ours, separate, strict=True)]
    )
    return float(errors.max())


def _results(device: torch.device, run: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return outputs, and gradients of the images, weights, scales and shifts."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    outer, inner = CHANNELS
    x, shortcut = (draw(*IMAGES).bfloat16().contiguous(memory_format=torch.channels_last) for _ in range(2))
    convs = []
    for channels, width, stride in ((outer, inner, 1), (inner, outer, 1), (outer, inner, 1), (outer, inner, 2)):
        conv = nn.Conv2d(channels, width, 1, stride, bias=False, device="meta")  # its values are drawn here
        conv.weight = nn.Parameter(draw(width, channels, 1, 1) / channels**0.5)
        convs.append(conv)
    norms = [BatchNorm(channels).to(device) for channels in (inner, outer)]
    for norm in norms:
        norm.bias.data.copy_(draw(len(norm.bias)))
    leaves = [x.requires_grad_(), shortcut.requires_grad_(), *(conv.weight for conv in convs)]
    leaves += [parameter for norm in norms for parameter in (norm.weight, norm.bias)]
    outputs = run(x, shortcut, convs, norms)
    torch.autograd.backward(outputs, [draw(*y.shape).to(y.dtype) for y in outputs])
    return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _run_kernels(x: Tensor, shortcut: Tensor, convs: list[nn.Conv2d], norms: list[BatchNorm]) -> tuple[Tensor, Tensor]:
    y = gemm.norm_relu_convolve(norms[0], convs[1], gemm.convolve(convs[0], x))
    y, projected = gemm.sum_convolve_twice(PendingSum(norms[1], y, shortcut), convs[2], convs[3])
    return y.images, projected.images


def _run_separately(
    x: Tensor, shortcut: Tensor, convs: list[nn.Conv2d], norms: list[BatchNorm]
) -> tuple[Tensor, Tensor]:
    def normalise(norm: BatchNorm, y: Tensor) -> Tensor:
        return F.batch_norm(y, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)

    weights = [conv.weight for conv in convs]
    y = F.conv2d(F.relu(normalise(norms[0], F.conv2d(x.float(), weights[0]))), weights[1])
    y = F.relu(normalise(norms[1], y) + shortcut)
    return F.conv2d(y, weights[2]), F.conv2d(y, weights[3], stride=convs[3].stride)
