"""Kronecker factors of Shampoo: blocks of parameters, factors distributed over the ranks, and their inverse roots.

Every dimension of every block has one factor: a symmetric matrix, the moving sum of G G^T with G the block's gradient
unfolded along that dimension. A rank keeps the factors assigned to it and computes their inverse roots. The roots,
which all ranks need, are gathered in one message (Anil 2020, section 5). So every root is computed once and is
bit-identical everywhere. Blocks of one shape are stacked (see `podscale.training.param_layout` for the blocks).

Inverse roots (S + eps I) ^ (-1 / p) of symmetric positive semi-definite matrices, many of one size at a time:

| method | computed from                                          | waits for the device     |
|--------|--------------------------------------------------------|--------------------------|
| eigh   | eigenvalues and eigenvectors                           | to check for failure     |
| newton | products of a coupled iteration (Guo and Higham 2006)  | never                    |

eigh is exact to the dtype's rounding for any p. newton takes the number of iterations that a condition number of 1e14
needs, each masked once its matrix has converged; p is any whole number, powers of two being fastest.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from podscale.pytorch.optim.base import ReplicaGroup
from podscale.pytorch.optim.param_shard import ParamSlice
from podscale.training.param_layout import merge_small_dims, partition_blocks, shampoo_dim_order


class BlockIndex(NamedTuple):
    """One block: `number` counts those of its segment, `row` those of its stack."""

    slice_index: int
    number: int
    row: int


class BlockStack(NamedTuple):
    """All blocks of one shape.

    positions: where their elements are in the flat layout, int64 [blocks, *shape].
    """

    shape: tuple[int, ...]
    block_indices: list[BlockIndex]
    positions: Tensor

    def gather_blocks(self, flat: Tensor) -> Tensor:
        """A copy of the blocks, fp32 [blocks, *shape]."""
        return flat.index_select(0, self.positions.view(-1)).view(self.positions.shape)

    def scatter_blocks(self, flat: Tensor, blocks: Tensor) -> None:
        """Writes the blocks to where they were taken from."""
        flat.index_copy_(0, self.positions.view(-1), blocks.reshape(-1))


def stack_blocks(
    param_slices: Sequence[ParamSlice], block: int, device: torch.device, *, vectors: bool
) -> tuple[BlockStack, ...]:
    """The blocks of these segments by shape; `vectors`: those of segments with a single dimension too."""
    flat = torch.arange(max((s.start + s.size for s in param_slices), default=0))
    found: dict[tuple[int, ...], list[tuple[BlockIndex, Tensor]]] = {}
    for segment, parameter in enumerate(param_slices):
        view = parameter.view(flat)
        if view.dim() > 1 or vectors:
            for number, part in enumerate(cut_blocks(view, block)):
                same = found.setdefault(tuple(part.shape), [])
                same.append((BlockIndex(segment, number, len(same)), part))
    return tuple(
        BlockStack(shape, [place for place, _ in same], torch.stack([part for _, part in same]).to(device))
        for shape, same in found.items()
    )


def cut_blocks(parameter: Tensor, block: int) -> Iterator[Tensor]:
    """The blocks of a parameter, merged, in their order."""
    turned = parameter.permute(shampoo_dim_order(parameter.dim()))
    tensor = turned.reshape(merge_small_dims(turned.shape, block))
    for place in partition_blocks(tensor.shape, block):
        yield tensor[tuple(slice(*span) for span in place)]


RootMethod = Literal["eigh", "newton"]

NEWTON_ITERATIONS = 60
"""Of newton: a small eigenvalue grows by (1 + 1/p) ^ p, at least twofold, in each; then a few quadratic ones."""
NEWTON_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Of newton: the largest difference from the identity at which a matrix has converged."""


def inverse_root(matrices: Tensor, power: int, eps: float, method: RootMethod, dtype: torch.dtype) -> Tensor:
    """(S + eps I) ^ (-1 / power) of fp32 matrices [n, d, d], computed in `dtype`; fp32, NaN where it failed."""
    if not matrices.numel():
        return matrices.clone()
    damped = matrices.to(dtype)
    damped = (damped + damped.mT) / 2 + eps * torch.eye(damped.shape[-1], dtype=dtype, device=damped.device)
    return (_root_by_eigh(damped, power, eps) if method == "eigh" else _root_by_newton(damped, power)).float()


def _root_by_eigh(damped: Tensor, power: int, eps: float) -> Tensor:
    """Rounding leaves some of the eigenvalues that are 0 a little below it: none counts as less than eps."""
    values, vectors = torch.linalg.eigh(damped)
    scaled = vectors * values.clamp(min=eps).pow(-1.0 / power)[..., None, :]
    root: Tensor = scaled @ vectors.mT
    return root


def _root_by_newton(damped: Tensor, power: int) -> Tensor:
    """M = A z and H = z^(1/p) I at first; T = ((p + 1) I - M) / p, M = T^p M and H = H T until M is the identity.

    z = (1 + p) / (2 |A|) brings all eigenvalues of M to between 0 and (1 + p) / 2, where the iteration converges. A
    matrix that has not after all iterations becomes NaN.
    """
    one = torch.eye(damped.shape[-1], dtype=damped.dtype, device=damped.device)
    z = (1 + power) / (2 * torch.linalg.matrix_norm(damped))[:, None, None]
    m, h = damped * z, one * z ** (1.0 / power)
    error = _distance(m, one)
    for _ in range(NEWTON_ITERATIONS):
        t = ((power + 1) * one - m) / power
        running = error > NEWTON_TOLERANCE[damped.dtype]
        m, h = torch.where(running, torch.linalg.matrix_power(t, power) @ m, m), torch.where(running, h @ t, h)
        error = _distance(m, one)
    return torch.where(error < 0.1, (h + h.mT) / 2, torch.nan)


def _distance(m: Tensor, one: Tensor) -> Tensor:
    return (m - one).abs().amax((-2, -1), keepdim=True)


class KroneckerFactor(NamedTuple):
    """One matrix of `size` x `size`: that of dimension `dim` of block `row` of stack `stack`."""

    stack: int
    dim: int
    row: int
    size: int


def list_factors(stacks: Sequence[BlockStack]) -> list[KroneckerFactor]:
    """All factors, those of one side of a stack after each other."""
    return [
        KroneckerFactor(number, dim, row, size)
        for number, stack in enumerate(stacks)
        for dim, size in enumerate(stack.shape)
        for row in range(len(stack.block_indices))
    ]


def assign_factors(factors: Sequence[KroneckerFactor], ranks: int) -> list[int]:
    """Whose each factor is: the largest first, each to the rank with least to do, at a cost of size^3."""
    owner, load = [0] * len(factors), [0] * ranks
    for number in sorted(range(len(factors)), key=lambda number: -factors[number].size):
        rank = min(range(ranks), key=load.__getitem__)
        owner[number] = rank
        load[rank] += factors[number].size ** 3
    return owner


class DimFactors:
    """The factors of one dimension of a stack, as far as this rank knows them.

    local_rows: the blocks whose matrices this rank keeps, int64. statistics: those, fp32 [own, d, d]. roots: the
    inverse roots of all, fp32 [blocks, d, d]. message_offsets: where each begins in the message of all ranks, int64
    [blocks].
    """

    def __init__(self, factors: Sequence[tuple[KroneckerFactor, int, int]], rank: int, device: torch.device) -> None:
        """`factors`: of each block in order, whose it is, and where it begins in the message."""
        self.dim, self.size = factors[0][0].dim, factors[0][0].size
        self.local_rows = torch.tensor(
            [f.row for f, owner, _ in factors if owner == rank], dtype=torch.int64, device=device
        )
        self.message_offsets = torch.tensor([start for _, _, start in factors], device=device)
        self.statistics = torch.zeros(len(self.local_rows), self.size, self.size, device=device)
        self.roots = torch.eye(self.size, device=device).repeat(len(self.message_offsets), 1, 1)

    def accumulate(self, blocks: Tensor, keep: float, add: float, finite: Tensor) -> None:
        """S = keep * S + add * G G^T for what this rank keeps."""
        along = blocks.index_select(0, self.local_rows).movedim(1 + self.dim, 1)
        unfolded = along.reshape(len(along), self.size, blocks[0].numel() // self.size)
        replace_finite(
            self.statistics, torch.baddbmm(self.statistics, unfolded, unfolded.mT, beta=keep, alpha=add), finite
        )

    def unpack_message(self, message: Tensor) -> Tensor:
        """All matrices, fp32 [blocks, d, d], out of the message of all ranks."""
        within = torch.arange(self.size**2, device=message.device)
        return message[self.message_offsets[:, None] + within].view(-1, self.size, self.size)


def replace_finite(kept: Tensor, fresh: Tensor, finite: Tensor) -> None:
    """Takes over the matrices that are finite, where the update is: squares may overflow, roots may fail."""
    good = fresh.isfinite().flatten(1).all(1) & finite
    torch.where(good[:, None, None], fresh, kept, out=kept)


class KroneckerFactors:
    """All factors of all stacks; every rank calls everything at the same time."""

    def __init__(
        self,
        param_slices: Sequence[ParamSlice],
        stacks: Sequence[BlockStack],
        replica_group: ReplicaGroup,
        *,
        exponent: int | None,
        eps: float,
        method: RootMethod,
        dtype: torch.dtype,
    ) -> None:
        """`exponent`: p of the inverse p-th root; None: twice the dimensions of a block (Gupta 2018)."""
        self._param_slices, self._stacks, self._replica_group = param_slices, stacks, replica_group
        self._exponent, self._eps, self._method, self._dtype = exponent, eps, method, dtype
        factors = list_factors(stacks)
        owners = assign_factors(factors, replica_group.size)
        self._length, starts = message_layout(factors, owners, replica_group.size)
        every = list(zip(factors, owners, starts, strict=True))
        self.dim_factors = [
            [
                DimFactors(
                    [f for f in every if (f[0].stack, f[0].dim) == (number, dim)],
                    replica_group.rank,
                    stack.positions.device,
                )
                for dim in range(len(stack.shape))
            ]
            for number, stack in enumerate(stacks)
        ]

    @property
    def nbytes(self) -> int:
        """What this rank keeps."""
        return sum(side.statistics.nbytes + side.roots.nbytes for side in self._all_dim_factors())

    def accumulate(self, blocks: Sequence[Tensor], beta2: float, finite: Tensor) -> None:
        """Takes the gradients of all stacks into the statistics: a moving average, or with beta2 = 1 the sum."""
        for sides, of_stack in zip(self.dim_factors, blocks, strict=True):
            for side in sides:
                side.accumulate(of_stack, beta2, 1.0 if beta2 == 1.0 else 1.0 - beta2, finite)

    def update_roots(self, finite: Tensor) -> None:
        """Takes the inverse roots anew."""
        fresh = self._gather_matrices(
            [
                inverse_root(side.statistics, self._exponent or 2 * len(sides), self._eps, self._method, self._dtype)
                for sides in self.dim_factors
                for side in sides
            ]
        )
        for side, roots in zip(self._all_dim_factors(), fresh, strict=True):
            replace_finite(side.roots, roots, finite)

    def precondition(self, stack: int, blocks: Tensor) -> Tensor:
        """The blocks multiplied by their roots along every dimension, in their shape."""
        for side in self.dim_factors[stack]:  # each product moves the dimension that it was along to the end
            number, size, *others = blocks.shape
            blocks = torch.bmm(blocks.reshape(number, size, -1).mT, side.roots).view(number, *others, size)
        return blocks

    def arrays(self) -> dict[str, Tensor]:
        """Statistics and roots of each parameter, fp32 vectors by name, the same on all ranks.

        In the order of blocks (the last dimension of the parameter fastest) and of their dimensions, row by row: none
        depends on how they are dealt out.
        """
        found: dict[str, Tensor] = {}
        statistics = self._gather_matrices([side.statistics for side in self._all_dim_factors()])
        for kind, whole in (("statistics", statistics), ("roots", [side.roots for side in self._all_dim_factors()])):
            for segment, matrices in self._by_segment(whole):
                found[f"{kind}/{segment.name}"] = torch.cat([matrix.reshape(-1) for matrix in matrices])
        return found

    def load(self, arrays: Mapping[str, Tensor]) -> None:
        """Takes over what `arrays` gave, of any number of ranks."""
        for kind in ("statistics", "roots"):
            whole = [torch.empty_like(side.roots) for side in self._all_dim_factors()]
            for segment, matrices in self._by_segment(whole):
                parts = arrays[f"{kind}/{segment.name}"].split([matrix.numel() for matrix in matrices])
                for matrix, part in zip(matrices, parts, strict=True):
                    matrix.copy_(part.view(matrix.shape))
            for side, values in zip(self._all_dim_factors(), whole, strict=True):
                if kind == "roots":
                    side.roots.copy_(values)
                else:
                    side.statistics.copy_(values.index_select(0, side.local_rows))

    def _all_dim_factors(self) -> Iterator[DimFactors]:
        return (side for sides in self.dim_factors for side in sides)

    def _by_segment(self, whole: Sequence[Tensor]) -> Iterator[tuple[ParamSlice, list[Tensor]]]:
        """The matrices of each segment that has some, given those of all sides."""
        of_side = iter(whole)
        found: dict[int, list[tuple[int, int, Tensor]]] = {}
        for stack in self._stacks:
            for dim in range(len(stack.shape)):
                for place, matrix in zip(stack.block_indices, next(of_side), strict=True):
                    found.setdefault(place.slice_index, []).append((place.number, dim, matrix))
        for number in sorted(found):
            in_order = sorted(found[number], key=lambda entry: entry[:2])
            yield self._param_slices[number], [matrix for _, _, matrix in in_order]

    def _gather_matrices(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The matrices of all ranks, side by side, from those of this one."""
        message = torch.cat([matrices.reshape(-1) for matrices in own])
        padded = torch.nn.functional.pad(message, (0, self._length - len(message)))
        gathered = self._replica_group.all_gather(padded)
        return [side.unpack_message(gathered) for side in self._all_dim_factors()]


def message_layout(factors: Sequence[KroneckerFactor], owners: Sequence[int], ranks: int) -> tuple[int, list[int]]:
    """Elements of each rank's part of the message, which are as many of all, and where each factor begins."""
    ends = [0] * ranks
    within = []
    for factor, owner in zip(factors, owners, strict=True):
        within.append(ends[owner])
        ends[owner] += factor.size**2
    length = max(ends)
    return length, [owner * length + start for owner, start in zip(owners, within, strict=True)]
