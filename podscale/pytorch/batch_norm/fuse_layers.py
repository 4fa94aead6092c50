"""Choice of Triton's kernels for a model's batch norm, if they compile and compute the right values on the device.

The kernels of 1x1 convolutions are checked before a training uses them (see `gemm_check`).
"""

import logging
from importlib.util import find_spec

import torch
from torch import nn

from podscale.pytorch.batch_norm.layer import FUSED_CHANNELS, BatchNorm, batch_norm_layers
from podscale.util.kernel_errors import kernel_errors

log = logging.getLogger(__name__)

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
    except kernel_errors() as error:
        log.warning(f"batch norm runs in separate operations: Triton cannot compile the fused kernels: {error}")
        return False
    folds = convolutions and _gemm_kernels_work(device)
    for layer in batch_norm_layers(model):
        layer.is_fused, layer.folds_convolutions = True, folds
    return True


def _gemm_kernels_work(device: torch.device) -> bool:
    """Return True if the kernels of 1x1 convolutions compute the right values on the device; else log a warning."""
    from podscale.pytorch.batch_norm import gemm_check  # needs Triton

    try:
        error = gemm_check.largest_error(device)
        problem = f"their relative error is {error:.2g}"
    except kernel_errors() as failure:
        error, problem = float("inf"), f"Triton cannot compile them: {failure}"
    if error <= TOLERATED_ERROR:  # not if it is NaN
        log.info(f"1x1 convolutions run as fused kernels: their relative error in bf16 is {error:.2g}")
        gemm_check.choose_loads(device)
        return True
    log.warning(f"1x1 convolutions run without the fused kernels: {problem}")
    return False


def gemm_load_facts(model: nn.Module) -> dict[str, str]:
    """Return how the kernels of 1x1 convolutions load their tiles (see `gemm_check`); {} if `model` runs none."""
    if not any(layer.folds_convolutions for layer in batch_norm_layers(model)):
        return {}
    from podscale.pytorch.batch_norm import gemm_check  # needs Triton

    return dict(gemm_check.load_facts)
