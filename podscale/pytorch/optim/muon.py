"""Muon: momentum whose matrices are orthogonalised (Jordan 2024, https://kellerjordan.github.io/posts/muon).

With g the gradient of a parameter:

    m = momentum * m + g;  u = g + momentum * m if nesterov else m
    matrices:  d = scale * orthogonalise(u),  r = rate
    others:    d = u,                         r = other_rate * rate
    w = w - r * (d + weight_decay * w)

The orthogonalised matrix is about U V^T of the singular value decomposition U S V^T: all singular values become about
1, so that rare directions of the gradient count as much as frequent ones. `scale` is that of
`podscale.training.muon.update_scale`. Weight decay is decoupled (Liu 2025).

The ranks share the matrices: each orthogonalises those assigned to it, and one message gathers all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from podscale.config.optimizer import MuonSection
from podscale.pytorch.optim.base import HyperParams, Optimizer, ReplicaGroup, where_finite
from podscale.pytorch.optim.param_shard import ParamShard, ParamSlice
from podscale.pytorch.optim.shared_work import assign_owners, gather_message, message_layout
from podscale.training.muon import EPS, NEWTON_SCHULZ, matrix_shape, update_scale


class Muon(Optimizer):
    """Muon (see the module). `shard` has all weights; the ranks of `replica_group` share the matrices.

    Orthogonalised are the parameters of two or more dimensions with `uses_trust_ratio`.
    """

    def __init__(self, shard: ParamShard, section: MuonSection, replica_group: ReplicaGroup, *, nesterov: bool) -> None:
        self._shard, self._nesterov = shard, nesterov
        is_matrix = [each.uses_trust_ratio and len(each.shape) > 1 for each in shard.param_slices]
        matrices = [each for each, chosen in zip(shard.param_slices, is_matrix, strict=True) if chosen]
        self._matrices = SharedMatrices(matrices, shard.gradients, section, replica_group)
        self._rate_factors = torch.where(torch.tensor(is_matrix), 1.0, section.other_rate).to(shard.device)
        self.moments, self.scalars = {"momentum": shard.zeros()}, dict[str, Tensor]()
        self._momenta = shard.views(self.moments["momentum"])

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        for group, momenta in zip(self._shard.groups, self._momenta, strict=True):
            # The gradients are 0 if they are not finite.
            torch._foreach_mul_(momenta, where_finite(finite, hyper.momentum, 1.0))
            torch._foreach_add_(momenta, group.gradients)
            if self._nesterov:
                torch._foreach_addcmul_(group.gradients, momenta, [hyper.momentum] * len(momenta))
            else:
                torch._foreach_copy_(group.gradients, momenta)
        self._matrices.orthogonalise()
        rates = where_finite(finite, hyper.learning_rate * self._rate_factors, 0.0)
        kept = 1.0 - rates * hyper.weight_decay * self._shard.uses_weight_decay
        rate_parts, kept_parts = self._shard.per_part(-rates), self._shard.per_part(kept)
        for group in self._shard.groups:
            parts = slice(group.first, group.last)
            torch._foreach_mul_(group.weights, kept_parts[parts])
            torch._foreach_addcmul_(group.weights, group.gradients, rate_parts[parts])
        return finite


class SharedMatrices:
    """Gradients of these parameters as matrices. Every rank calls `orthogonalise` at the same time."""

    def __init__(
        self, slices: Sequence[ParamSlice], gradients: Tensor, section: MuonSection, replica_group: ReplicaGroup
    ) -> None:
        self._section, self._replica_group = section, replica_group
        by_shape = sorted(slices, key=lambda each: matrix_shape(each.shape))
        shapes = [matrix_shape(each.shape) for each in by_shape]
        owners = assign_owners([rows * columns * min(rows, columns) for rows, columns in shapes], replica_group.size)
        self._length, self._starts = message_layout([r * c for r, c in shapes], owners, replica_group.size)
        self._views = [each.view(gradients) for each in by_shape]
        self._local: dict[tuple[int, int], list[Tensor]] = {}
        """Views that this rank orthogonalises, by the shape of their matrices, in the order of the message."""
        for view, shape, owner in zip(self._views, shapes, owners, strict=True):
            if owner == replica_group.rank:
                self._local.setdefault(shape, []).append(view)

    def orthogonalise(self) -> None:
        """Replace the gradients by scaled orthogonalised ones."""
        if not self._views:
            return
        local = [self._views[0].new_empty(0)]  # a rank may have no matrix
        for shape, views in self._local.items():
            stack = torch.stack([view.reshape(shape) for view in views])
            local.append(update_scale(*shape, self._section) * newton_schulz(stack, self._section))
        message = gather_message(local, self._length, self._replica_group)
        pairs = zip(self._views, self._starts, strict=True)
        torch._foreach_copy_(
            self._views, [message.narrow(0, start, view.numel()).view(view.shape) for view, start in pairs]
        )


def newton_schulz(matrices: Tensor, section: MuonSection) -> Tensor:
    """Return nearly orthogonal matrices with the singular vectors of `matrices`, [n, rows, columns], in their dtype."""
    a, b, c = NEWTON_SCHULZ
    dtype = {"fp32": matrices.dtype, "bf16": torch.bfloat16}[section.precision]
    is_high = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_high else matrices).to(dtype)
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + EPS)
    for _ in range(section.iterations):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = (x.mT if is_high else x).to(matrices.dtype).contiguous()
    return result
