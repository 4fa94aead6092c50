"""The running statistics of batch norm, kept equal on all ranks.

Each rank sees its own batches, so plain running statistics drift apart. The field averages them over the ranks before
an evaluation or a checkpoint (flax's ImageNet example, timm's `--dist-bn reduce`). A running average is linear, so
doing it at every update gives the same values, and then there is one truth at every step: a checkpoint holds one copy,
restores at any world size, and a run stopped anywhere resumes to the bit. It costs no message: the values travel with
the gradients (see reducer). As in the field, the variance is the mean of the ranks' variances.
"""

import torch
from torch import Tensor, nn

from podscale.pytorch.batchnorm import BatchNorm


class RunningStatistics:
    """All running means and variances of a model as views of one flat fp32 tensor."""

    def __init__(self, model: nn.Module) -> None:
        modules = [module for module in model.modules() if isinstance(module, BatchNorm)]
        pairs = [(module, name) for module in modules for name in ("running_mean", "running_var")]
        self.flat = torch.cat([getattr(module, name) for module, name in pairs])
        parts = self.flat.split([getattr(module, name).numel() for module, name in pairs])
        for (module, name), part in zip(pairs, parts, strict=True):
            setattr(module, name, part)
        self._before = self.flat.clone()

    def __len__(self) -> int:
        return len(self.flat)

    def remember(self) -> None:
        """Keeps the values from before a forward pass, to go back to if the update is masked."""
        self._before.copy_(self.flat)

    def settle(self, averaged: Tensor, finite: Tensor) -> None:
        """Takes over the averaged values, or the remembered ones where the update is not finite."""
        torch.where(finite, averaged, self._before, out=self.flat)
