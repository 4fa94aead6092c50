"""Adam (Kingma 2015), a baseline: decay as part of the gradient, as in torch, or beside it (AdamW; Loshchilov 2019).

torch's own kernels are not used: they take beta 1 from the host, where a schedule of the momentum lies on the device,
and those for lists of tensors know no mask.
"""

import torch
from torch import Tensor

from podscale.pytorch.optim.base import HyperParams, where_finite
from podscale.pytorch.optim.moments import AdamMoments
from podscale.pytorch.optim.momentum import add_weight_decay
from podscale.pytorch.optim.share import ParamShard


class Adam:
    """w -= rate * u with the direction u of `Moments`, of g + weight_decay * w.

    decoupled: u of g alone, and w -= rate * weight_decay * w.
    """

    def __init__(self, shard: ParamShard, *, beta2: float = 0.999, eps: float = 1e-8, decoupled: bool = False) -> None:
        self._shard, self._decoupled = shard, decoupled
        self._moments = AdamMoments(shard, beta2=beta2, eps=eps)
        self.moments, self.scalars = self._moments.values, {"updates": self._moments.updates}

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        finite = self._shard.mask_nonfinite(finite)
        decay, away = where_finite(finite, hyper.weight_decay, 0.0), where_finite(finite, -hyper.learning_rate, 0.0)
        corrections = self._moments.bias_corrections(hyper.momentum, finite)
        for number, group in enumerate(self._shard.groups):
            if not self._decoupled:
                add_weight_decay(group, decay)
            self._moments.write_directions(number, hyper.momentum, corrections, finite)
            if self._decoupled:
                add_weight_decay(group, decay)
            torch._foreach_addcmul_(group.weights, group.gradients, [away] * len(group.weights))
        return finite
