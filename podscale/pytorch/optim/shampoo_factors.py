"""Kronecker factors of Shampoo: blocks of parameters, factors distributed over the ranks, and their inverse roots.

Every dimension of every block has one factor: a symmetric matrix, the moving average or sum of G G^T, G being the
block's gradient unfolded along that dimension. A rank holds the statistics of the factors assigned to it and computes
their inverse roots. The roots, which all ranks need, are gathered in one message (Anil 2020, section 5). So every root
is computed once and is bit-identical everywhere. Blocks of one shape are stacked (see `podscale.training.shampoo`).

Inverse roots (S + eps I) ^ (-1 / p) of symmetric positive semi-definite matrices, many of one size at a time:

| method | computed from                                          | waits for the device     |
|--------|--------------------------------------------------------|--------------------------|
| eigh   | eigenvalues and eigenvectors                           | to check for failure     |
| newton | products of a coupled iteration (Guo and Higham 2006)  | never                    |

eigh is exact to the dtype's rounding for any p. newton runs the number of iterations that a condition number of 1e14
needs, each masked once its matrix has converged; p is any integer, powers of two being fastest.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from podscale.config.optimizer import ShampooSection
from podscale.pytorch.optim.base import ReplicaGroup
from podscale.pytorch.optim.param_shard import ParamSlice
from podscale.pytorch.optim.shared_work import assign_owners, gather_message, message_layout
from podscale.training.shampoo import (
    MAX_NEWTON_ERROR,
    NEWTON_ITERATIONS,
    NEWTON_TOLERANCE,
    merge_small_dims,
    partition_blocks,
    shampoo_dim_order,
)


class BlockIndex(NamedTuple):
    """Index of a block: that of its parameter's slice, and its number within the parameter."""

    slice_index: int
    number: int


class BlockStack(NamedTuple):
    """All blocks of one shape; `positions` are those of their elements in the flat layout, int64 [blocks, *shape]."""

    shape: tuple[int, ...]
    block_indices: list[BlockIndex]
    positions: Tensor

    def gather_blocks(self, flat: Tensor) -> Tensor:
        """Return a copy of the blocks in `flat`, fp32 [blocks, *shape]."""
        return flat.index_select(0, self.positions.view(-1)).view(self.positions.shape)

    def scatter_blocks(self, flat: Tensor, blocks: Tensor) -> None:
        """Write `blocks` to their positions in `flat`: the inverse of `gather_blocks`."""
        flat.index_copy_(0, self.positions.view(-1), blocks.reshape(-1))


def stack_blocks(
    param_slices: Sequence[ParamSlice], block: int, device: torch.device, *, vectors: bool
) -> tuple[BlockStack, ...]:
    """Cut the parameters into blocks and stack those of one shape.

    Args:
        block: maximal length of a block in each dimension.
        vectors: include 1-D parameters.
    """
    # Numbers the elements of the flat layout: cut like the parameters, it gives the positions of each block.
    flat = torch.arange(max((each.start + each.size for each in param_slices), default=0))
    by_shape: dict[tuple[int, ...], list[tuple[BlockIndex, Tensor]]] = {}
    for slice_index, each in enumerate(param_slices):
        view = each.view(flat)
        if view.dim() > 1 or vectors:
            for number, positions in enumerate(_cut_blocks(view, block)):
                by_shape.setdefault(tuple(positions.shape), []).append((BlockIndex(slice_index, number), positions))
    return tuple(
        BlockStack(
            shape, [index for index, _ in blocks], torch.stack([positions for _, positions in blocks]).to(device)
        )
        for shape, blocks in by_shape.items()
    )


def _cut_blocks(parameter: Tensor, block: int) -> Iterator[Tensor]:
    """Merge the small dimensions of a parameter and yield its blocks, in order."""
    permuted = parameter.permute(shampoo_dim_order(parameter.dim()))
    merged = permuted.reshape(merge_small_dims(permuted.shape, block))
    for spans in partition_blocks(merged.shape, block):
        yield merged[tuple(slice(*span) for span in spans)]


class KroneckerFactor(NamedTuple):
    """Address of one factor, a matrix of `size` x `size`: dimension `dim` of block `row` of stack `stack`."""

    stack: int
    dim: int
    row: int
    size: int


def list_factors(stacks: Sequence[BlockStack]) -> list[KroneckerFactor]:
    """Return all factors, by stack, dimension and block, so that those of one dimension are neighbours."""
    return [
        KroneckerFactor(number, dim, row, size)
        for number, stack in enumerate(stacks)
        for dim, size in enumerate(stack.shape)
        for row in range(len(stack.block_indices))
    ]


class DimFactors:
    """Factors of one dimension of a stack: the statistics that this rank owns, and all inverse roots.

    Attributes:
        local_rows: blocks whose statistics this rank owns, int64.
        statistics: fp32 [local rows, d, d].
        roots: inverse roots of all blocks, fp32 [blocks, d, d].
        message_offsets: start of each block's matrix in the message of all ranks, int64 [blocks].
    """

    def __init__(self, factors: Sequence[tuple[KroneckerFactor, int, int]], rank: int, device: torch.device) -> None:
        """Start without statistics. `factors` has factor, owning rank and message offset of each block, in order."""
        self.stack, self.dim, _, self.size = factors[0][0]
        local_rows = [factor.row for factor, owner, _ in factors if owner == rank]
        self.local_rows = torch.tensor(local_rows, dtype=torch.int64, device=device)
        self.message_offsets = torch.tensor([start for _, _, start in factors], device=device)
        self.statistics = torch.zeros(len(local_rows), self.size, self.size, device=device)
        self.roots = torch.eye(self.size, device=device).repeat(len(factors), 1, 1)

    def accumulate(self, blocks: Tensor, beta2: float, finite: Tensor) -> None:
        """Add the gradients of the stack to the local statistics: a moving average, or with beta2 = 1 a sum.

        Args:
            blocks: gradients of all blocks, fp32 [blocks, *shape].
            finite: bool scalar; if False, nothing is added.
        """
        local = blocks.index_select(0, self.local_rows).movedim(1 + self.dim, 1)
        unfolded = local.reshape(len(local), self.size, blocks[0].numel() // self.size)
        weight = 1.0 if beta2 == 1.0 else 1.0 - beta2
        sums = torch.baddbmm(self.statistics, unfolded, unfolded.mT, beta=beta2, alpha=weight)
        _copy_finite_matrices(self.statistics, sums, finite)

    def unpack_message(self, message: Tensor) -> Tensor:
        """Return all matrices, fp32 [blocks, d, d], from the `message` of all ranks, fp32 [elements]."""
        offsets = self.message_offsets[:, None] + torch.arange(self.size**2, device=message.device)
        return message[offsets].view(-1, self.size, self.size)


def _copy_finite_matrices(target: Tensor, matrices: Tensor, finite: Tensor) -> None:
    """Copy the finite matrices into `target` if the step is finite: squares may overflow, roots may fail."""
    is_copied = matrices.isfinite().flatten(1).all(1) & finite
    torch.where(is_copied[:, None, None], matrices, target, out=target)


class KroneckerFactors:
    """Factors of all stacks. Every rank calls every method at the same time."""

    def __init__(
        self,
        param_slices: Sequence[ParamSlice],
        stacks: Sequence[BlockStack],
        replica_group: ReplicaGroup,
        section: ShampooSection,
    ) -> None:
        self._param_slices, self._stacks, self._replica_group = param_slices, stacks, replica_group
        self._section = section
        factors = list_factors(stacks)
        owners = assign_owners([factor.size**3 for factor in factors], replica_group.size)
        sizes = [factor.size**2 for factor in factors]
        self._message_length, offsets = message_layout(sizes, owners, replica_group.size)
        assigned = groupby(zip(factors, owners, offsets, strict=True), key=lambda entry: entry[0][:2])
        self._dim_factors = [
            DimFactors(list(entries), replica_group.rank, stacks[stack].positions.device)
            for (stack, _), entries in assigned
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of statistics and roots on this rank."""
        return sum(each.statistics.nbytes + each.roots.nbytes for each in self._dim_factors)

    def accumulate(self, blocks: Sequence[Tensor], finite: Tensor) -> None:
        """Add the gradients of each stack, `blocks`, to the statistics if `finite` (bool scalar)."""
        for each in self._dim_factors:
            each.accumulate(blocks[each.stack], self._section.beta2, finite)

    def update_roots(self, finite: Tensor) -> None:
        """Compute the inverse roots of this rank's factors and gather all roots; keep the old ones if not `finite`."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}[self._section.roots_precision]
        local_roots = []
        for each in self._dim_factors:
            power = self._section.exponent or 2 * len(self._stacks[each.stack].shape)
            local_roots.append(inverse_root(each.statistics, power, self._section.eps, self._section.roots, dtype))
        for each, roots in zip(self._dim_factors, self._gather_matrices(local_roots), strict=True):
            _copy_finite_matrices(each.roots, roots, finite)

    def precondition(self, stack: int, blocks: Tensor) -> Tensor:
        """Return the `blocks` of a stack, [blocks, *shape], multiplied by their roots along every dimension."""
        for each in self._dim_factors:
            if each.stack == stack:  # each product moves its dimension to the end
                count, size, *others = blocks.shape
                blocks = torch.bmm(blocks.reshape(count, size, -1).mT, each.roots).view(count, *others, size)
        return blocks

    def arrays(self) -> dict[str, Tensor]:
        """Return statistics and roots of each parameter, fp32 vectors by name, the same on all ranks.

        A vector has the matrices of one parameter, block by block (the last dimension of the parameter fastest), then
        dimension by dimension, each row by row. The order does not depend on the assignment to ranks.
        """
        statistics = self._gather_matrices([each.statistics for each in self._dim_factors])
        matrices = {"statistics": statistics, "roots": [each.roots for each in self._dim_factors]}
        return {
            f"{kind}/{name}": torch.cat([matrix.reshape(-1) for matrix in of_param])
            for kind, of_dims in matrices.items()
            for name, of_param in self._by_param(of_dims)
        }

    def load(self, arrays: Mapping[str, Tensor]) -> None:
        """Load what the method `arrays` returned (fp32 vectors by name), possibly at another number of ranks."""
        for kind in ("statistics", "roots"):
            of_dims = [torch.empty_like(each.roots) for each in self._dim_factors]
            for name, of_param in self._by_param(of_dims):
                parts = arrays[f"{kind}/{name}"].split([matrix.numel() for matrix in of_param])
                for matrix, part in zip(of_param, parts, strict=True):
                    matrix.copy_(part.view(matrix.shape))
            for each, values in zip(self._dim_factors, of_dims, strict=True):
                if kind == "roots":
                    each.roots.copy_(values)
                else:
                    each.statistics.copy_(values.index_select(0, each.local_rows))

    def _by_param(self, of_dims: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield name and matrices of each parameter that has blocks. `of_dims` has those of each of `_dim_factors`."""
        by_slice: dict[int, list[tuple[int, int, Tensor]]] = {}
        for each, matrices in zip(self._dim_factors, of_dims, strict=True):
            for index, matrix in zip(self._stacks[each.stack].block_indices, matrices, strict=True):
                by_slice.setdefault(index.slice_index, []).append((index.number, each.dim, matrix))
        for slice_index, entries in sorted(by_slice.items()):
            entries.sort(key=lambda entry: entry[:2])
            yield self._param_slices[slice_index].name, [matrix for _, _, matrix in entries]

    def _gather_matrices(self, local: Sequence[Tensor]) -> list[Tensor]:
        """Gather matrices: `local` has this rank's for each of `_dim_factors`; return all ranks' likewise."""
        gathered = gather_message(local, self._message_length, self._replica_group)
        return [each.unpack_message(gathered) for each in self._dim_factors]


RootMethod = Literal["eigh", "newton"]


def inverse_root(matrices: Tensor, power: int, eps: float, method: RootMethod, dtype: torch.dtype) -> Tensor:
    """Return (S + eps I) ^ (-1 / power) of matrices S [n, d, d], in their dtype; NaN on failure.

    Computes in `dtype`.
    """
    if not matrices.numel():
        return matrices.clone()
    damped = matrices.to(dtype)
    damped = (damped + damped.mT) / 2 + eps * torch.eye(damped.shape[-1], dtype=dtype, device=damped.device)
    return (_root_by_eigh(damped, power, eps) if method == "eigh" else _root_by_newton(damped, power)).to(
        matrices.dtype
    )


def _root_by_eigh(damped: Tensor, power: int, eps: float) -> Tensor:
    """Return the roots by eigenvalues, clamped to eps, because rounding may leave the smallest a little below it."""
    values, vectors = torch.linalg.eigh(damped)
    scaled = vectors * values.clamp(min=eps).pow(-1.0 / power)[..., None, :]
    root: Tensor = scaled @ vectors.mT
    return root


def _root_by_newton(damped: Tensor, power: int) -> Tensor:
    """Return the roots by a coupled Newton iteration (`power` is p).

    T = ((p + 1) I - M) / p, M = T^p M, H = H T, from M = A z, H = z^(1/p) I, until M is the identity. A is the damped
    matrix.

    z = (1 + p) / (2 |A|) brings all eigenvalues of M to between 0 and (1 + p) / 2, where the iteration converges. A
    matrix that has not converged after all iterations becomes NaN.
    """
    one = torch.eye(damped.shape[-1], dtype=damped.dtype, device=damped.device)
    z = (1 + power) / (2 * torch.linalg.matrix_norm(damped))[:, None, None]
    m, h = damped * z, one * z ** (1.0 / power)
    error = _distance(m, one)
    for _ in range(NEWTON_ITERATIONS):
        t = ((power + 1) * one - m) / power
        running = error > NEWTON_TOLERANCE[damped.dtype.itemsize]
        m, h = torch.where(running, torch.linalg.matrix_power(t, power) @ m, m), torch.where(running, h @ t, h)
        error = _distance(m, one)
    return torch.where(error < MAX_NEWTON_ERROR, (h + h.mT) / 2, torch.nan)


def _distance(m: Tensor, one: Tensor) -> Tensor:
    return (m - one).abs().amax((-2, -1), keepdim=True)
