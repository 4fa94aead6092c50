"""The Kronecker factors of all blocks, dealt out over the ranks.

Every dimension of every block has one: a symmetric matrix, the moving sum of G G^T with G the block's gradient
unfolded along that dimension. A rank keeps the matrices that it is dealt and takes their inverse roots; the roots,
which all ranks need, are gathered in one message (Anil 2020, section 5). So every root is computed once, and is the
same to the bit everywhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from podscale.pytorch.optim.peers import ReplicaGroup
from podscale.pytorch.optim.shampoo.blocks import BlockStack
from podscale.pytorch.optim.shampoo.roots import RootMethod, inverse_root
from podscale.pytorch.optim.share import ParamSlice


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
        for row in range(len(stack.places))
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

    own: the blocks whose matrices this rank keeps, int64. statistics: those, fp32 [own, d, d]. roots: the inverse roots
    of all, fp32 [blocks, d, d]. starts: where each begins in the message of all ranks, int64 [blocks].
    """

    def __init__(self, factors: Sequence[tuple[KroneckerFactor, int, int]], rank: int, device: torch.device) -> None:
        """`factors`: of each block in order, whose it is, and where it begins in the message."""
        self.dim, self.size = factors[0][0].dim, factors[0][0].size
        self.own = torch.tensor([f.row for f, owner, _ in factors if owner == rank], dtype=torch.int64, device=device)
        self.starts = torch.tensor([start for _, _, start in factors], device=device)
        self.statistics = torch.zeros(len(self.own), self.size, self.size, device=device)
        self.roots = torch.eye(self.size, device=device).repeat(len(self.starts), 1, 1)

    def accumulate(self, blocks: Tensor, keep: float, add: float, finite: Tensor) -> None:
        """S = keep * S + add * G G^T for what this rank keeps."""
        along = blocks.index_select(0, self.own).movedim(1 + self.dim, 1)
        unfolded = along.reshape(len(along), self.size, blocks[0].numel() // self.size)
        replace_finite(
            self.statistics, torch.baddbmm(self.statistics, unfolded, unfolded.mT, beta=keep, alpha=add), finite
        )

    def whole(self, message: Tensor) -> Tensor:
        """All matrices, fp32 [blocks, d, d], out of the message of all ranks."""
        within = torch.arange(self.size**2, device=message.device)
        return message[self.starts[:, None] + within].view(-1, self.size, self.size)


def replace_finite(kept: Tensor, fresh: Tensor, finite: Tensor) -> None:
    """Takes over the matrices that are finite, where the update is: squares may overflow, roots may fail."""
    good = fresh.isfinite().flatten(1).all(1) & finite
    torch.where(good[:, None, None], fresh, kept, out=kept)


class KroneckerFactors:
    """All factors of all stacks; every rank calls everything at the same time."""

    def __init__(
        self,
        segments: Sequence[ParamSlice],
        stacks: Sequence[BlockStack],
        peers: ReplicaGroup,
        *,
        exponent: int | None,
        eps: float,
        method: RootMethod,
        dtype: torch.dtype,
    ) -> None:
        """`exponent`: p of the inverse p-th root; None: twice the dimensions of a block (Gupta 2018)."""
        self._segments, self._stacks, self._peers = segments, stacks, peers
        self._exponent, self._eps, self._method, self._dtype = exponent, eps, method, dtype
        factors = list_factors(stacks)
        owners = assign_factors(factors, peers.size)
        self._length, starts = message_layout(factors, owners, peers.size)
        every = list(zip(factors, owners, starts, strict=True))
        self.sides = [
            [
                DimFactors(
                    [f for f in every if (f[0].stack, f[0].dim) == (number, dim)], peers.rank, stack.positions.device
                )
                for dim in range(len(stack.shape))
            ]
            for number, stack in enumerate(stacks)
        ]

    @property
    def nbytes(self) -> int:
        """What this rank keeps."""
        return sum(side.statistics.nbytes + side.roots.nbytes for side in self._each())

    def accumulate(self, blocks: Sequence[Tensor], beta2: float, finite: Tensor) -> None:
        """Takes the gradients of all stacks into the statistics: a moving average, or with beta2 = 1 the sum."""
        for sides, of_stack in zip(self.sides, blocks, strict=True):
            for side in sides:
                side.accumulate(of_stack, beta2, 1.0 if beta2 == 1.0 else 1.0 - beta2, finite)

    def refresh(self, finite: Tensor) -> None:
        """Takes the inverse roots anew."""
        fresh = self._gathered(
            [
                inverse_root(side.statistics, self._exponent or 2 * len(sides), self._eps, self._method, self._dtype)
                for sides in self.sides
                for side in sides
            ]
        )
        for side, roots in zip(self._each(), fresh, strict=True):
            replace_finite(side.roots, roots, finite)

    def precondition(self, stack: int, blocks: Tensor) -> Tensor:
        """The blocks multiplied by their roots along every dimension, in their shape."""
        for side in self.sides[stack]:  # each product moves the dimension that it was along to the end
            number, size, *others = blocks.shape
            blocks = torch.bmm(blocks.reshape(number, size, -1).mT, side.roots).view(number, *others, size)
        return blocks

    def arrays(self) -> dict[str, Tensor]:
        """Statistics and roots of each parameter, fp32 vectors by name, the same on all ranks.

        In the order of blocks (the last dimension of the parameter fastest) and of their dimensions, row by row: none
        depends on how they are dealt out.
        """
        found: dict[str, Tensor] = {}
        statistics = self._gathered([side.statistics for side in self._each()])
        for kind, whole in (("statistics", statistics), ("roots", [side.roots for side in self._each()])):
            for segment, matrices in self._by_segment(whole):
                found[f"{kind}/{segment.name}"] = torch.cat([matrix.reshape(-1) for matrix in matrices])
        return found

    def load(self, arrays: Mapping[str, Tensor]) -> None:
        """Takes over what `arrays` gave, of any number of ranks."""
        for kind in ("statistics", "roots"):
            whole = [torch.empty_like(side.roots) for side in self._each()]
            for segment, matrices in self._by_segment(whole):
                parts = arrays[f"{kind}/{segment.name}"].split([matrix.numel() for matrix in matrices])
                for matrix, part in zip(matrices, parts, strict=True):
                    matrix.copy_(part.view(matrix.shape))
            for side, values in zip(self._each(), whole, strict=True):
                if kind == "roots":
                    side.roots.copy_(values)
                else:
                    side.statistics.copy_(values.index_select(0, side.own))

    def _each(self) -> Iterator[DimFactors]:
        return (side for sides in self.sides for side in sides)

    def _by_segment(self, whole: Sequence[Tensor]) -> Iterator[tuple[ParamSlice, list[Tensor]]]:
        """The matrices of each segment that has some, given those of all sides."""
        of_side = iter(whole)
        found: dict[int, list[tuple[int, int, Tensor]]] = {}
        for stack in self._stacks:
            for dim in range(len(stack.shape)):
                for place, matrix in zip(stack.places, next(of_side), strict=True):
                    found.setdefault(place.segment, []).append((place.number, dim, matrix))
        for number in sorted(found):
            in_order = sorted(found[number], key=lambda entry: entry[:2])
            yield self._segments[number], [matrix for _, _, matrix in in_order]

    def _gathered(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The matrices of all ranks, side by side, from those of this one."""
        message = torch.cat([matrices.reshape(-1) for matrices in own])
        padded = torch.nn.functional.pad(message, (0, self._length - len(message)))
        gathered = self._peers.gather(padded)
        return [side.whole(gathered) for side in self._each()]


def message_layout(factors: Sequence[KroneckerFactor], owners: Sequence[int], ranks: int) -> tuple[int, list[int]]:
    """Elements of each rank's part of the message, which are as many of all, and where each factor begins."""
    ends = [0] * ranks
    within = []
    for factor, owner in zip(factors, owners, strict=True):
        within.append(ends[owner])
        ends[owner] += factor.size**2
    length = max(ends)
    return length, [owner * length + start for owner, start in zip(owners, within, strict=True)]
