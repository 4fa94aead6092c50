"""Choice of Triton's kernels for a model's batch norm, if they compile and compute the right values on the device.

The kernels of 1x1 convolutions are compared with separate operations on two small blocks before a training uses them.
"""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from subprocess import SubprocessError

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podscale.pytorch.batch_norm.layer import FUSED_CHANNELS, BatchNorm, batch_norm_layers

log = logging.getLogger(__name__)

CHECKED_CHANNELS = (64, 32)
"""Channels of a checked block's output and inside it."""
CHECKED_IMAGES = (3, CHECKED_CHANNELS[0], 10, 9)
TOLERATED_ERROR = 0.2
"""Largest relative error of a result in bf16, by its norm. Outputs differ by roundings, about 0.01; gradients by up to
0.1, because a rounding may change the sign of a ReLU's input."""


def fuse_batch_norm(model: nn.Module, device: torch.device, *, convolutions: bool = False) -> bool:
    """Let every batch norm of `model`, on a GPU, run Triton's kernels; return False if Triton cannot compile them.

    Args:
        convolutions: let them run the 1x1 convolutions beside them too, if these kernels compute the right values.
    """
    if find_spec("triton") is None:
        return False
    with device:
        probe, images = BatchNorm(FUSED_CHANNELS), torch.zeros(1, FUSED_CHANNELS, 2, 2)
    probe.is_fused = True
    try:
        probe(images.contiguous(memory_format=torch.channels_last))
    except (RuntimeError, OSError, SubprocessError) as error:
        log.warning(f"batch norm runs in separate operations: Triton cannot compile the fused kernels: {error}")
        return False
    folds = convolutions and _gemm_kernels_work(device)
    for layer in batch_norm_layers(model):
        layer.is_fused, layer.folds_convolutions = True, folds
    return True


def _gemm_kernels_work(device: torch.device) -> bool:
    """Return True if the kernels of 1x1 convolutions compute the right values on the device; else log a warning."""
    try:
        error = largest_error(device)
        problem = f"their relative error is {error:.2g}"
    except (RuntimeError, OSError, SubprocessError) as failure:
        error, problem = float("inf"), f"Triton cannot compile them: {failure}"
    if error <= TOLERATED_ERROR:  # not if it is NaN
        log.info(f"1x1 convolutions run as fused kernels: their relative error in bf16 is {error:.2g}")
        return True
    log.warning(f"1x1 convolutions run without the fused kernels: {problem}")
    return False


def largest_error(device: torch.device) -> float:
    """Return the kernels' largest relative error, of outputs and gradients of two blocks in bf16; NaN if one is NaN."""
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

    outer, inner = CHECKED_CHANNELS
    x, shortcut = (draw(*CHECKED_IMAGES).bfloat16().contiguous(memory_format=torch.channels_last) for _ in range(2))
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
    from podscale.pytorch.batch_norm import gemm  # needs Triton

    y, moments = gemm.norm_relu_convolve(norms[0], convs[1], *gemm.convolve(convs[0], x))
    (y, _), (projected, _) = gemm.sum_convolve_twice(norms[1], y, shortcut, convs[2], convs[3], moments)
    return y, projected


def _run_separately(
    x: Tensor, shortcut: Tensor, convs: list[nn.Conv2d], norms: list[BatchNorm]
) -> tuple[Tensor, Tensor]:
    def normalise(norm: BatchNorm, y: Tensor) -> Tensor:
        return F.batch_norm(y, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)

    weights = [conv.weight for conv in convs]
    y = F.conv2d(F.relu(normalise(norms[0], F.conv2d(x.float(), weights[0]))), weights[1])
    y = F.relu(normalise(norms[1], y) + shortcut)
    return F.conv2d(y, weights[2]), F.conv2d(y, weights[3], stride=convs[3].stride)
