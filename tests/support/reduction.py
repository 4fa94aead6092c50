"""What every all-reduce must give, bit by bit: sums in the order that podscale.pytorch.all_reduce.plan states.

Every partial sum is fp32 where it is made and in the wire's format where it travels.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from podscale.pytorch.all_reduce.plan import (
    equal_spans,
    mirror_position,
    ring_chain,
    row_chain,
    tree_children,
    tree_parent,
)
from podscale.pytorch.all_reduce.torus2d import slice_spans
from podscale.pytorch.comm_queue import slice_count

Sum = Callable[[Sequence[Tensor]], Tensor]
"""The sum of one contribution a place."""


def on_wire(values: Tensor, wire: torch.dtype) -> Tensor:
    return values.to(wire).float()


def chain(values: Sequence[Tensor], places: Sequence[int], wire: torch.dtype) -> Tensor:
    """Added one after the other; what the last place holds."""
    total = values[places[0]]
    for place in places[1:]:
        total = values[place] + on_wire(total, wire)
    return total


def ring_shards(values: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """A ring reduce-scatter: every place's part, one after the other."""
    size = len(values)
    parts = enumerate(equal_spans(len(values[0]), size))
    return torch.cat([chain([v[a:b] for v in values], ring_chain(part, size), wire) for part, (a, b) in parts])


def ring(values: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    return values[0] if len(values) == 1 else on_wire(ring_shards(values, wire), wire)


def tree(values: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """One binary tree."""
    size = len(values)

    def below(place: int) -> Tensor:
        total = values[place]
        for child in tree_children(place, size):
            total = total + on_wire(below(child), wire)
        return total

    root = next(place for place in range(size) if tree_parent(place, size) is None)
    return below(root) if size == 1 else on_wire(below(root), wire)


def double_tree(values: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    (a, b), (c, d) = equal_spans(len(values[0]), 2)
    order = sorted(range(len(values)), key=lambda place: mirror_position(place, len(values)))
    return torch.cat([tree([v[a:b] for v in values], wire), tree([values[p][c:d] for p in order], wire)])


def torus2d(values: Sequence[Tensor], row: int, wire_row: torch.dtype, column: Sum) -> Tensor:
    """`values` by rank, rows of consecutive ranks; `column` adds along a column."""
    result = torch.empty_like(values[0])
    rows = [values[start : start + row] for start in range(0, len(values), row)]
    for cut in slice_spans(len(result), row, slice_count(len(result), (len(rows), row), "cpu")):
        for part, (a, b) in enumerate(cut):
            shards = [chain([v[a:b] for v in one], ring_chain(part, row), wire_row) for one in rows]
            total = column(shards)
            result[a:b] = total if row == 1 else on_wire(total, wire_row)
    return result


def hierarchical(values: Sequence[Tensor], row: int, wire_row: torch.dtype, column: Sum) -> Tensor:
    result = torch.empty_like(values[0])
    rows = [values[start : start + row] for start in range(0, len(values), row)]
    for a, b in equal_spans(len(result), slice_count(len(result), (len(rows), row), "cpu")):
        total = column([chain([v[a:b] for v in one], row_chain(row), wire_row) for one in rows])
        result[a:b] = total if row == 1 else on_wire(total, wire_row)
    return result
