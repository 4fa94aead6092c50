"""The running statistics of batch norm, kept equal on all ranks.

Each rank sees its own batches, so plain running statistics drift apart. The field averages them over the ranks before
an evaluation or a checkpoint (Google's JAX entry to MLPerf v0.7, flax's ImageNet example, timm's `--dist-bn reduce`).
A running average is linear, so doing it at every update gives the same values, and then there is one truth at every
step: a checkpoint holds one copy, restores at any world size, and a run stopped anywhere resumes to the bit. It costs
no message: what an update changed travels with the gradients (see reducer). The change and not the value, so that a
message in half precision rounds a tenth of a difference: rounded values would stop following at 2 % of themselves (8
bits, momentum 0.1). As in the field, the variance is the mean of the ranks' variances. Google's TensorFlow entry to
v0.6 does not synchronise them; taking those of the first rank stands for that.
"""

import torch
from torch import Tensor, nn

from podscale.config.model import BatchNormSection
from podscale.pytorch.batchnorm.layer import BatchNorm
from podscale.pytorch.world import World


class RunningStatistics:
    """All running means and variances of a model as views of one flat fp32 tensor.

    weight: weight of this rank's values in the average over the ranks (1 each: their mean).
    """

    def __init__(self, model: nn.Module, *, weight: float = 1.0) -> None:
        self._weight = weight
        modules = [module for module in model.modules() if isinstance(module, BatchNorm)]
        pairs = [(module, name) for module in modules for name in ("running_mean", "running_var")]
        self.flat = torch.cat([getattr(module, name) for module, name in pairs])
        parts = self.flat.split([getattr(module, name).numel() for module, name in pairs])
        for (module, name), part in zip(pairs, parts, strict=True):
            setattr(module, name, part)
        self._saved = self.flat.clone()

    def __len__(self) -> int:
        return len(self.flat)

    def save(self) -> None:
        """Keeps the values from before a forward pass, to go back to if the update is masked."""
        self._saved.copy_(self.flat)

    def write_change(self, to_average: Tensor) -> None:
        """Writes what this rank brings to the average over the ranks: the change since `remember`."""
        torch.sub(self.flat, self._saved, out=to_average).mul_(self._weight)

    def apply_change(self, change: Tensor, finite: Tensor) -> None:
        """Takes over the averaged change, or goes back to the remembered values where the update is not finite."""
        torch.where(finite, self._saved + change, self._saved, out=self.flat)


def running_statistics_weight(section: BatchNormSection, world: World) -> float:
    """This rank's weight: the same for all ranks, or everything for the first."""
    if section.running == "mean":
        return 1.0
    return float(world.size) if world.is_rank0 else 0.0
