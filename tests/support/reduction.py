"""Bit-exact results of every all-reduce: sums in the order of podscale.pytorch.all_reduce.plan.

Every partial sum is computed in fp32 and sent in the wire format.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from podscale.pytorch.all_reduce.plan import equal_spans, mirror_position, tree_children, tree_parent
from podscale.pytorch.all_reduce.torus2d import slice_spans
from podscale.pytorch.all_reduce.wire_formats import WireFormat
from podscale.pytorch.comm_queue import slice_count

Sum = Callable[[Sequence[Tensor]], Tensor]
"""Return the sum of one contribution of each position."""


def on_wire(values: Tensor, wire: WireFormat) -> Tensor:
    return wire.decode(wire.encode(values), len(values)).float()


def chain(values: Sequence[Tensor], order: Sequence[int], wire: WireFormat) -> Tensor:
    """Return the sum at the last position of a chain."""
    total = values[order[0]]
    for position in order[1:]:
        total = values[position] + on_wire(total, wire)
    return total


def exchange(values: Sequence[Tensor], owner: int, wire: WireFormat) -> Tensor:
    """Return the sum at the owner of a part, which receives all contributions but its own."""
    received = [part if position == owner else on_wire(part, wire) for position, part in enumerate(values)]
    return torch.stack(received).sum(0)


def ring_order(part: int, size: int) -> list[int]:
    """Return the positions in the order in which a ring adds them to `part`."""
    return [(part + 1 + step) % size for step in range(size)]


def row_order(size: int) -> list[int]:
    """Return the positions in the order in which a chain that ends at position 0 adds them."""
    return list(range(size - 1, -1, -1))


def ring_shards(values: Sequence[Tensor], wire: WireFormat) -> Tensor:
    """Return the result of a ring reduce-scatter: every position's part in order."""
    size = len(values)
    parts = enumerate(equal_spans(len(values[0]), size))
    return torch.cat([chain([v[a:b] for v in values], ring_order(part, size), wire) for part, (a, b) in parts])


def ring(values: Sequence[Tensor], wire: WireFormat) -> Tensor:
    return values[0] if len(values) == 1 else on_wire(ring_shards(values, wire), wire)


def tree(values: Sequence[Tensor], wire: WireFormat) -> Tensor:
    """Return the sum over one binary tree."""
    size = len(values)

    def below(position: int) -> Tensor:
        total = values[position]
        for child in tree_children(position, size):
            total = total + on_wire(below(child), wire)
        return total

    root = next(position for position in range(size) if tree_parent(position, size) is None)
    return below(root) if size == 1 else on_wire(below(root), wire)


def double_tree(values: Sequence[Tensor], wire: WireFormat) -> Tensor:
    (a, b), (c, d) = equal_spans(len(values[0]), 2)
    order = sorted(range(len(values)), key=lambda position: mirror_position(position, len(values)))
    return torch.cat([tree([v[a:b] for v in values], wire), tree([values[p][c:d] for p in order], wire)])


def torus2d(values: Sequence[Tensor], row: int, wire_row: WireFormat, column: Sum) -> Tensor:
    """Return the torus sum of `values` by rank, with rows of consecutive ranks; `column` adds along a column."""
    result = torch.empty_like(values[0])
    rows = [values[start : start + row] for start in range(0, len(values), row)]
    for cut in slice_spans(len(result), row, slice_count(len(result), (len(rows), row), "cpu")):
        for part, (a, b) in enumerate(cut):
            shards = [chain([v[a:b] for v in one], ring_order(part, row), wire_row) for one in rows]
            total = column(shards)
            result[a:b] = total if row == 1 else on_wire(total, wire_row)
    return result


def hierarchical(values: Sequence[Tensor], row: int, wire_row: WireFormat, column: Sum) -> Tensor:
    result = torch.empty_like(values[0])
    rows = [values[start : start + row] for start in range(0, len(values), row)]
    for a, b in equal_spans(len(result), slice_count(len(result), (len(rows), row), "cpu")):
        total = column([chain([v[a:b] for v in one], row_order(row), wire_row) for one in rows])
        result[a:b] = total if row == 1 else on_wire(total, wire_row)
    return result
