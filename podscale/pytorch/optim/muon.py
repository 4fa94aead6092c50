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

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from podscale.config.optimizer import MuonSection
from podscale.pytorch.optim.base import HyperParams, Optimizer, ReplicaGroup, where_finite
from podscale.pytorch.optim.param_shard import ParamShard, ParamSlice
from podscale.pytorch.optim.shared_work import assign_owners, message_layout
from podscale.training.muon import EPS, NEWTON_SCHULZ, matrix_shape, orthogonalised_parameters, update_scale


class Muon(Optimizer):
    """Muon (see the module). `shard` has all weights; the ranks of `replica_group` share the matrices."""

    def __init__(self, shard: ParamShard, section: MuonSection, replica_group: ReplicaGroup, *, nesterov: bool) -> None:
        self._shard, self._nesterov = shard, nesterov
        chosen = orthogonalised_parameters(
            [each.shape for each in shard.param_slices],
            [each.uses_trust_ratio for each in shard.param_slices],
            ends=section.ends,
        )
        self._matrices = SharedMatrices(shard, chosen, section, replica_group)
        is_chosen = torch.zeros(len(shard.param_slices), dtype=torch.bool)
        is_chosen[chosen] = True
        self._rate_factors = torch.where(is_chosen, 1.0, section.other_rate).to(shard.device)
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
        self._matrices.orthogonalise(self._shard.gradients)
        rates = where_finite(finite, hyper.learning_rate * self._rate_factors, 0.0)
        kept = 1.0 - rates * hyper.weight_decay * self._shard.uses_weight_decay
        rate_parts, kept_parts = self._shard.per_part(-rates), self._shard.per_part(kept)
        for group in self._shard.groups:
            parts = slice(group.first, group.last)
            torch._foreach_mul_(group.weights, kept_parts[parts])
            torch._foreach_addcmul_(group.weights, group.gradients, rate_parts[parts])
        return finite


class MatrixStack(NamedTuple):
    """Matrices of one shape.

    Args:
        positions: positions of their elements in the flat layout, int64 [matrices, rows, columns].
        scale: factor of the orthogonalised matrices.
        local: matrices that this rank orthogonalises, int64.
        starts: start of each matrix in the message of all ranks.
    """

    positions: Tensor
    scale: float
    local: Tensor
    starts: list[int]


class SharedMatrices:
    """Matrices of the chosen parameters. Every rank calls `orthogonalise` at the same time."""

    def __init__(
        self, shard: ParamShard, chosen: Sequence[int], section: MuonSection, replica_group: ReplicaGroup
    ) -> None:
        self._section, self._replica_group = section, replica_group
        slices = sorted((shard.param_slices[index] for index in chosen), key=lambda each: matrix_shape(each.shape))
        shapes = [matrix_shape(each.shape) for each in slices]
        owners = assign_owners([rows * columns * min(rows, columns) for rows, columns in shapes], replica_group.size)
        self._message_length, starts = message_layout([r * c for r, c in shapes], owners, replica_group.size)
        self._stacks = list(_stack_matrices(slices, owners, starts, section, replica_group.rank, shard.device))

    def orthogonalise(self, flat: Tensor) -> None:
        """Replace the matrices in `flat`, fp32 [elements], by scaled orthogonalised ones."""
        local = [self._orthogonalise_local(stack, flat) for stack in self._stacks]
        if not local:
            return
        message = torch.cat(local)
        message = self._replica_group.all_gather(
            torch.nn.functional.pad(message, (0, self._message_length - len(message)))
        )
        for stack in self._stacks:
            size = stack.positions[0].numel()
            gathered = torch.cat([message.narrow(0, start, size) for start in stack.starts])
            flat.index_copy_(0, stack.positions.view(-1), gathered)

    def _orthogonalise_local(self, stack: MatrixStack, flat: Tensor) -> Tensor:
        """Return this rank's matrices of a stack, one after the other."""
        matrices = flat[stack.positions.index_select(0, stack.local)]
        return (stack.scale * newton_schulz(matrices, self._section)).view(-1)


def _stack_matrices(
    slices: Sequence[ParamSlice],
    owners: Sequence[int],
    starts: Sequence[int],
    section: MuonSection,
    rank: int,
    device: torch.device,
) -> Iterator[MatrixStack]:
    """Yield the stacks of slices that are in the order of their shapes."""
    # Numbers the elements of the flat layout: viewed as the parameters, it gives the positions of each matrix.
    flat = torch.arange(max((each.start + each.size for each in slices), default=0))
    numbers = range(len(slices))
    for shape in dict.fromkeys(matrix_shape(each.shape) for each in slices):
        members = [number for number in numbers if matrix_shape(slices[number].shape) == shape]
        positions = torch.stack([slices[number].view(flat).reshape(shape) for number in members])
        local = torch.tensor([row for row, number in enumerate(members) if owners[number] == rank], dtype=torch.int64)
        scale = update_scale(*shape, section.scale)
        yield MatrixStack(positions.to(device), scale, local.to(device), [starts[number] for number in members])


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
