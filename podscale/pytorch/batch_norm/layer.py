"""Batch norm layer: statistics of a batch, of its parts or of a group of ranks (see `groups`), and running statistics.

Running statistics. They are averaged over the ranks at every step. The field averages them before an evaluation or a
checkpoint (Google's JAX entry to MLPerf v0.7, flax's ImageNet example, timm's `--dist-bn reduce`). A running average is
linear, so both give the same values; with ours a checkpoint holds one copy, restores at any world size, and a resumed
run is bit-exact. It costs no extra message: the change of a step is sent with the gradients (see reducer). The change
is sent, not the value: rounded to bf16 (8 bits), a value would stop changing once the batch is within 2 % of it (at
momentum 0.1).
As in the field, the variance is the mean of the ranks' variances. Google's TensorFlow entry to v0.6 does not
synchronise them, which corresponds to the statistics of the first rank.
"""

import logging
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from podscale.config.model import BatchNormSection
from podscale.config.ranks import BatchNormGroup
from podscale.pytorch.batch_norm.groups import ghost_batch_norm, sync_batch_norm
from podscale.pytorch.world import World

log = logging.getLogger(__name__)

FUSED_CHANNELS = 8
"""Divisor of the channels that the fused kernels take: one byte of a mask."""
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the images that the fused kernels take."""
GEMM_CHANNELS = 16
"""Divisor of the channels that the GEMM kernels take: the least side of a tensor core's product."""
GEMM_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of the images that the GEMM kernels take. Products of fp32 keep cuDNN's precision."""


class BatchNorm(nn.Module):
    """Batch norm per channel of images [n, channels, height, width], over the batch, the batches of `group`, or parts.

    Statistics are fp32 (fp64 for fp64 images), whatever the dtype of the images; the output has the dtype and memory
    order of the images. The running variance is the unbiased one, as in torch and cuDNN; flax stores the biased one,
    which is smaller by a factor of 1 - 1 / (values per channel) (6e-4 at 32 images of 7 x 7). There is no
    `num_batches_tracked`: the momentum does not depend on it, and a counter is one more kernel per layer and step.

    Attributes:
        group: ranks whose batches are normalised together; None: this rank alone.
        part_size: images of a part, normalised by itself (see `groups`); None: the batch.
        is_frozen: normalise by the running statistics in training too, and leave them as they are.
        is_fused: run Triton's kernels where they apply (see `runs_fused`).
        folds_convolutions: run 1x1 convolutions beside this layer as Triton's kernels too (see `folds`).
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.group: dist.ProcessGroup | None = None
        self.part_size: int | None = None
        self.is_frozen = False
        self.is_fused = False
        self.folds_convolutions = False
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def runs_fused(self, x: Tensor) -> bool:
        """Return True if the fused kernels apply to images `x`: in training, in NHWC order, and not in parts."""
        if not self.is_fused or not self.training or self.is_frozen or torch.compiler.is_compiling():
            return False
        has_parts = self.group is None and self.part_size is not None and len(x) >= 2 * self.part_size
        fits = x.shape[1] % FUSED_CHANNELS == 0 and x.dtype in FUSED_DTYPES
        return fits and not has_parts and x.is_contiguous(memory_format=torch.channels_last)

    def folds(self, conv: nn.Module, x: Tensor) -> TypeGuard[nn.Conv2d]:
        """Return True if the GEMM kernels compute `conv`, which is before or after this layer, of images `x`."""
        if not self.folds_convolutions or x.dtype not in GEMM_DTYPES or not self.runs_fused(x):
            return False
        return _is_plain_pointwise(conv)

    def forward(self, x: Tensor) -> Tensor:
        if self.runs_fused(x):
            from podscale.pytorch.batch_norm import fused  # needs Triton

            return fused.norm(self, x)
        running = (self.running_mean, self.running_var)
        if self.is_frozen:
            return F.batch_norm(x, *running, self.weight, self.bias, False, self.momentum, self.eps)
        if self.training and self.group is not None:
            y, mean, var = sync_batch_norm(x, self.weight, self.bias, self.eps, self.group)
            for average, new in zip(running, (mean, var), strict=True):
                average.lerp_(new, self.momentum)
            return y
        if self.training and self.part_size is not None and len(x) >= 2 * self.part_size:
            return ghost_batch_norm(x, self.weight, self.bias, running, self.part_size, self.momentum, self.eps)
        return F.batch_norm(x, *running, self.weight, self.bias, self.training, self.momentum, self.eps)


def _is_plain_pointwise(conv: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return True for a 1x1 convolution without bias, groups, padding or its own forward pass, of enough channels."""
    if type(conv) is not nn.Conv2d or conv.kernel_size != (1, 1) or conv.groups != 1 or conv.bias is not None:
        return False
    fits = conv.in_channels % GEMM_CHANNELS == 0 and conv.out_channels % GEMM_CHANNELS == 0
    return fits and conv.stride[0] == conv.stride[1] and conv.padding == (0, 0)


def assign_batch_norm_groups(model: nn.Module, world: World, norm_group: BatchNormGroup) -> None:
    """Set the statistics group of every batch norm of `model`. Every rank must call this at the same time.

    A group has its own communicator, since its messages run while another thread averages gradients. Groups are
    consecutive ranks, so that results do not depend on the nodes. Logs a warning if a group spans nodes. A later call
    with groups of the same size keeps the communicator.
    """
    layers = batch_norm_layers(model)
    before = next((layer.group for layer in layers), None)
    if before is not None and before.size() == norm_group.ranks:
        return
    group = world.consecutive_group(norm_group.ranks) if norm_group.ranks > 1 else None
    for layer in layers:
        layer.group, layer.part_size = group, None if group else norm_group.images
    if group and _crosses_nodes(norm_group.ranks, world.nodes()) and world.is_rank0:
        log.warning(
            f"batch-norm groups of {norm_group.ranks} ranks span nodes: {2 * len(layers)} small messages a step cross "
            "the network, each with its latency"
        )


def batch_norm_layers(model: nn.Module) -> list[BatchNorm]:
    return [module for module in model.modules() if isinstance(module, BatchNorm)]


def _crosses_nodes(ranks: int, nodes: tuple[int, ...]) -> bool:
    return any(len(set(nodes[start : start + ranks])) > 1 for start in range(0, len(nodes), ranks))


class BatchNormMomenta:
    """Momentum of a model's batch norm by step. `changes` has (first step, momentum) of each change, in order."""

    def __init__(self, model: nn.Module, changes: Sequence[tuple[int, float]]) -> None:
        self._layers, self._changes = batch_norm_layers(model), changes

    def start_step(self, step: int) -> None:
        """Set the momentum of step `step`, from 0, on the host."""
        momentum = next(value for first, value in reversed(self._changes) if step >= first)
        for layer in self._layers:
            layer.momentum = momentum


class RunningStatistics:
    """All running means and variances of a model in one flat fp32 tensor; `weight` is this rank's in the average."""

    def __init__(self, model: nn.Module, *, weight: float = 1.0) -> None:
        self._weight = weight
        pairs = [(layer, name) for layer in batch_norm_layers(model) for name in ("running_mean", "running_var")]
        device = next(model.parameters()).device
        self.flat = torch.cat([torch.empty(0, device=device), *(getattr(layer, name) for layer, name in pairs)])
        views = self.flat.split([getattr(layer, name).numel() for layer, name in pairs])
        for (layer, name), view in zip(pairs, views, strict=True):
            setattr(layer, name, view)
        self._saved = self.flat.clone()

    def __len__(self) -> int:
        return len(self.flat)

    def save(self) -> None:
        """Save the values before a forward pass, to restore them if the step is masked."""
        self._saved.copy_(self.flat)

    def write_change(self, to_average: Tensor) -> None:
        """Write the weighted change since `save` to `to_average`, fp32 [statistics], to be averaged over the ranks."""
        torch.sub(self.flat, self._saved, out=to_average).mul_(self._weight)

    def apply_change(self, change: Tensor, finite: Tensor) -> None:
        """Apply the averaged `change`, fp32 [statistics], or restore the saved values if `finite` (scalar) is False."""
        torch.where(finite, self._saved + change, self._saved, out=self.flat)


def running_statistics_weight(section: BatchNormSection, world: World) -> float:
    """Return the weight of this rank: 1, or with `running: first` the world size on rank 0 and 0 elsewhere."""
    if section.running == "mean":
        return 1.0
    return float(world.size) if world.is_rank0 else 0.0
