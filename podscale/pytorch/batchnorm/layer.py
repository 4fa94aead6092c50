"""Batch norm as a module of networks, and how it learns whom it shares statistics with."""

import logging

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from podscale.config.batch_norm_groups import BatchNormGroup
from podscale.pytorch.batchnorm.function import sync_batch_norm
from podscale.pytorch.batchnorm.parts import ghost_batch_norm
from podscale.pytorch.world import World

log = logging.getLogger(__name__)


class BatchNorm(nn.Module):
    """Normalises images [n, channels, height, width] per channel, over the batch, the batches of `group`, or parts.

    `part` cuts the batch into parts of so many images, each normalised by itself: what as many small cores would do.
    Statistics are fp32 (fp64 for fp64 images), whatever the images are; the output has the dtype and memory order of
    the images. Running statistics follow with weight `momentum`; those of parts are their means, as if each part were
    a rank. The running variance is the unbiased one, as in torch and cuDNN; flax keeps the biased one, which is less
    by one part in the values per channel (6e-4 at 32 images of 7 x 7). There is no `num_batches_tracked`: the momentum
    is constant, and one counter kernel per layer and step would buy nothing.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.group: dist.ProcessGroup | None = None
        self.part_size: int | None = None
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        running = (self.running_mean, self.running_var)
        if self.training and self.group is not None:
            y, mean, var = sync_batch_norm(x, self.weight, self.bias, self.eps, self.group)
            for kept, new in zip(running, (mean, var), strict=True):
                kept.lerp_(new, self.momentum)
            return y
        if self.training and self.part_size is not None and len(x) >= 2 * self.part_size:
            return ghost_batch_norm(x, self.weight, self.bias, *running, self.part_size, self.momentum, self.eps)
        return F.batch_norm(x, *running, self.weight, self.bias, self.training, self.momentum, self.eps)


def assign_batch_norm_groups(model: nn.Module, world: World, norm_group: BatchNormGroup) -> None:
    """Lets every batch norm of `model` take statistics over `span`. Every rank must call this at the same time.

    A group has a communicator of its own, since its messages run while another thread averages gradients. Groups are
    consecutive ranks, wherever these run, so that results do not depend on it; where they are not inside nodes, a
    warning says so.
    """
    layers = [module for module in model.modules() if isinstance(module, BatchNorm)]
    group = world.consecutive_group(norm_group.ranks) if norm_group.ranks > 1 else None
    for layer in layers:
        layer.group, layer.part_size = group, None if group else norm_group.images
    if group and _crosses_nodes(norm_group.ranks, world.nodes()) and world.is_rank0:
        log.warning(
            f"batch-norm groups of {norm_group.ranks} ranks reach over nodes: {2 * len(layers)} small messages a step go "
            "between them, each at the latency of the network"
        )


def _crosses_nodes(ranks: int, nodes: tuple[int, ...]) -> bool:
    return any(len(set(nodes[start : start + ranks])) > 1 for start in range(0, len(nodes), ranks))
