"""Grafting (Agarwal 2020): Shampoo says whither, a rule whose learning rates are understood says how far.

Google's MLPerf 1.0 entry takes the length of the plain gradient. Before the first preconditioned update that rule's
direction is taken as it is, and by segments without blocks always.
"""

from typing import Literal

import torch
from torch import Tensor

from podscale.pytorch.optim.base import where_finite
from podscale.pytorch.optim.share import ParamShard

GraftName = Literal["sgd", "adagrad", "rmsprop"]


class Grafting:
    """Turns gradients into the directions of the rule that is grafted on.

    sgd: g. adagrad: v = v + g^2, rmsprop: v = beta2 * v + (1 - beta2) * g^2; both g / (sqrt(v) + eps).
    """

    def __init__(self, shard: ParamShard, name: GraftName, *, beta2: float, eps: float) -> None:
        self._shard, self._eps = shard, eps
        self._keep, self._add = (1.0, 1.0) if name == "adagrad" or beta2 == 1.0 else (beta2, 1.0 - beta2)
        self.moments: dict[str, Tensor] = {} if name == "sgd" else {"variance": shard.zeros()}
        self._views = [shard.views(values) for values in self.moments.values()]

    def __call__(self, finite: Tensor) -> None:
        """Leaves the directions in the gradients, which are zero where not finite."""
        for views in self._views:
            keep = where_finite(finite, self._keep, 1.0)
            for group, variance in zip(self._shard.groups, views, strict=True):
                torch._foreach_mul_(variance, keep)
                torch._foreach_addcmul_(variance, group.gradients, group.gradients, self._add)
                root = torch._foreach_sqrt(variance)
                torch._foreach_add_(root, self._eps)
                torch._foreach_div_(group.gradients, root)
