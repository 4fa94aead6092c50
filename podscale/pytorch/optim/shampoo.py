"""Distributed Shampoo with grafting (Gupta 2018; Anil 2020), as in Google's MLPerf 1.0 entry of the open division.

With G a block of the gradient (see shampoo_factors) and L_i the sum over its other dimensions of G G^T along
dimension i:

    S_i = beta2 * S_i + (1 - beta2) * L_i           (beta2 = 1: S_i + L_i), from the first step on
    R_i = (S_i + eps I) ^ (-1 / p)                  every `every_steps` steps from `start_step` on
    P   = G x_1 R_1 x_2 R_2 ...                     of all blocks of a parameter, then
    d   = P * |graft| / |P| + weight_decay * w      with the norms of whole parameters
    m   = momentum * m + d;   w -= rate * (d + momentum * m if nesterov else m)

Grafting (Agarwal 2020) takes the direction from Shampoo and the length from a rule whose learning rates are understood;
Google's entry takes the length of the plain gradient. Before `start_step`, and always for parameters without blocks,
the grafted rule's direction is used unchanged.

The entry keeps a second momentum buffer, of the grafted directions, and the preconditioned one from the first step on.
Ours has one buffer for both, which differs for a few steps after `start_step`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from podscale.config.optimizer import ShampooSection
from podscale.pytorch.optim.base import (
    ExtraStateOptimizer,
    HyperParams,
    Optimizer,
    ReplicaGroup,
    StepAware,
    where_finite,
)
from podscale.pytorch.optim.param_shard import ParamNorms, ParamShard
from podscale.pytorch.optim.sgd import build_momentum_update
from podscale.pytorch.optim.shampoo_factors import KroneckerFactors, stack_blocks


class Shampoo(Optimizer, ExtraStateOptimizer, StepAware):
    """Shampoo (see the module). `shard` has all weights; the ranks of `replica_group` share the inverse roots."""

    def __init__(
        self, shard: ParamShard, section: ShampooSection, replica_group: ReplicaGroup, *, nesterov: bool
    ) -> None:
        self._shard, self._section, self._norms, self._step_index = shard, section, ParamNorms(shard), 0
        self._stacks = stack_blocks(shard.param_slices, section.block, shard.device, vectors=section.vectors)
        self._factors = KroneckerFactors(shard.param_slices, self._stacks, replica_group, section)
        self._graft = Grafting(shard, section)
        self._momentum = build_momentum_update(shard, nesterov=nesterov)
        self.moments, self.scalars = {"momentum": self._momentum.values, **self._graft.moments}, dict[str, Tensor]()

    def start_step(self, step: int) -> None:
        self._step_index = step

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        gradients, since_start = self._shard.gradients, self._step_index - self._section.start_step
        blocks = [stack.gather_blocks(gradients) for stack in self._stacks]
        self._factors.accumulate(blocks, finite)
        if since_start >= 0 and since_start % self._section.every_steps == 0:
            self._factors.update_roots(finite)
        self._graft(finite)
        if since_start >= 0:
            graft_norms = self._direction_norms(finite)
            for number, stack in enumerate(self._stacks):
                stack.scatter_blocks(gradients, self._factors.precondition(number, blocks[number]))
            self._rescale(graft_norms, self._direction_norms(finite))
        one = torch.ones_like(hyper.learning_rate)
        self._momentum.step(one, hyper.learning_rate, hyper.momentum, hyper.weight_decay, finite, decayed=False)
        return finite

    @property
    def extra_state_bytes(self) -> int:
        return self._factors.nbytes

    def extra_state_arrays(self) -> dict[str, Tensor]:
        return self._factors.arrays()

    def load_extra_state(self, arrays: Mapping[str, Tensor]) -> None:
        self._factors.load(arrays)

    def _direction_norms(self, finite: Tensor) -> Tensor:
        """Return the norm of each parameter's direction, fp32 [slices]."""
        norms = [norm for group in self._shard.groups for norm in torch._foreach_norm(group.gradient_chunks)]
        return self._norms(finite, norms)[1][0]

    def _rescale(self, graft_norms: Tensor, norms: Tensor) -> None:
        """Scale every parameter's direction to the norm of the grafted one."""
        ratio = self._shard.per_part(torch.where(norms > 0, graft_norms / norms, 1.0))
        for group in self._shard.groups:
            torch._foreach_mul_(group.gradients, ratio[group.first : group.last])


class Grafting:
    """Direction of the rule that is grafted on.

    sgd: g. adagrad: v = v + g^2, rmsprop: v = beta2 * v + (1 - beta2) * g^2; both g / (sqrt(v) + eps).
    """

    def __init__(self, shard: ParamShard, section: ShampooSection) -> None:
        self._shard, self._eps = shard, section.graft_eps
        is_sum = section.graft == "adagrad" or section.beta2 == 1.0
        self._keep, self._add = (1.0, 1.0) if is_sum else (section.beta2, 1.0 - section.beta2)
        self.moments: dict[str, Tensor] = {} if section.graft == "sgd" else {"variance": shard.zeros()}
        self._views = [shard.views(values) for values in self.moments.values()]

    def __call__(self, finite: Tensor) -> None:
        """Replace the gradients, which are zero if not finite, by the directions."""
        for views in self._views:
            keep = where_finite(finite, self._keep, 1.0)
            for group, variance in zip(self._shard.groups, views, strict=True):
                torch._foreach_mul_(variance, keep)
                torch._foreach_addcmul_(variance, group.gradients, group.gradients, self._add)
                root = torch._foreach_sqrt(variance)
                torch._foreach_add_(root, self._eps)
                torch._foreach_div_(group.gradients, root)
