"""Distributed Shampoo with grafting (Gupta 2018; Anil 2020), as in Google's MLPerf 1.0 entry of the open division.

With G a block of the gradient (see shampoo_factors) and L_i the sum over its other dimensions of G G^T along
dimension i:

    S_i = beta2 * S_i + (1 - beta2) * L_i           (beta2 = 1: S_i + L_i), from the first step on
    R_i = (S_i + eps I) ^ (-1 / p)                  every `every` steps from step `start` on
    P   = G x_1 R_1 x_2 R_2 ...                     of all blocks of a parameter, then
    d   = P * |graft| / |P| + weight_decay * w      with the norms of whole parameters
    m   = momentum * m + d;   w -= rate * (d + momentum * m if nesterov else m)

Grafting (Agarwal 2020) takes the direction from Shampoo and the length from a rule whose learning rates are understood;
Google's entry takes the length of the plain gradient. Before step `start`, and always for parameters without blocks,
the grafted rule's direction is used as it is.

The entry keeps a second momentum buffer, of a run with grafts alone, and the preconditioned one from the first step on.
Ours has one for both, which differs in the few steps that a momentum of 0.96 remembers of the start of the warm-up.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from podscale.pytorch.optim.base import HyperParams, ReplicaGroup, where_finite
from podscale.pytorch.optim.param_shard import ParamNorms, ParamShard
from podscale.pytorch.optim.sgd import build_momentum_update
from podscale.pytorch.optim.shampoo_factors import KroneckerFactors, RootMethod, stack_blocks

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


class Shampoo:
    """See the module's text. Every rank has all gradients and weights: `share` is of a whole update.

    block: most rows of a matrix. vectors: whether batch norm and biases are preconditioned too. exponent: p, or None
    for twice the dimensions of a block. dtype: of the roots' computation.
    """

    def __init__(
        self,
        shard: ParamShard,
        replica_group: ReplicaGroup,
        *,
        nesterov: bool = True,
        beta2: float = 0.999,
        eps: float = 1e-6,
        block: int = 128,
        vectors: bool = True,
        exponent: int | None = None,
        start: int = 1,
        every: int = 1,
        graft: GraftName = "sgd",
        graft_eps: float = 1e-10,
        roots: RootMethod = "eigh",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self._shard, self._norms = shard, ParamNorms(shard)
        self._beta2, self._start, self._every, self._step_index = beta2, start, every, 0
        self._stacks = stack_blocks(shard.param_slices, block, shard.device, vectors=vectors)
        self._factors = KroneckerFactors(
            shard.param_slices, self._stacks, replica_group, exponent=exponent, eps=eps, method=roots, dtype=dtype
        )
        self._graft = Grafting(shard, graft, beta2=beta2, eps=graft_eps)
        self._momentum = build_momentum_update(shard, nesterov=nesterov)
        self.moments, self.scalars = {"momentum": self._momentum.values, **self._graft.moments}, dict[str, Tensor]()

    def start_step(self, step: int) -> None:
        self._step_index = step

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        gradients, since = self._shard.gradients, self._step_index - self._start
        blocks = [stack.gather_blocks(gradients) for stack in self._stacks]
        self._factors.accumulate(blocks, self._beta2, finite)
        if since >= 0 and since % self._every == 0:
            self._factors.update_roots(finite)
        self._graft(finite)
        if since >= 0:
            lengths = self._direction_norms(finite)
            for number, stack in enumerate(self._stacks):
                stack.scatter_blocks(gradients, self._factors.precondition(number, blocks[number]))
            self._rescale(lengths, self._direction_norms(finite))
        one = torch.ones_like(hyper.learning_rate)
        self._momentum.step(one, hyper.learning_rate, hyper.momentum, hyper.weight_decay, finite, decayed=False)
        return finite

    def _direction_norms(self, finite: Tensor) -> Tensor:
        """The norm of each parameter's direction, fp32 [segments]."""
        pieces = [norm for group in self._shard.groups for norm in torch._foreach_norm(group.gradient_chunks)]
        _, (lengths,) = self._norms(finite, pieces)
        return lengths

    def _rescale(self, wanted: Tensor, found: Tensor) -> None:
        """Gives every parameter's direction the length of the grafted one."""
        ratio = self._shard.per_part(torch.where(found > 0, wanted / found, 1.0))
        for group in self._shard.groups:
            torch._foreach_mul_(group.gradients, ratio[group.first : group.last])

    @property
    def extra_state_bytes(self) -> int:
        return self._factors.nbytes

    def extra_state_arrays(self) -> dict[str, Tensor]:
        return self._factors.arrays()

    def load_extra_state(self, arrays: Mapping[str, Tensor]) -> None:
        self._factors.load(arrays)


__all__ = ["Shampoo"]
