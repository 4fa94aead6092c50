"""Ranks of a run as a grid: fast links along a row, slow ones along a column.

A row is (part of) a node, so a message along it stays inside the machine; a column holds the ranks at the same position
of every row. The launcher sets the node of each rank, so ranks need not be numbered node by node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from podscale.errors import InputError
from podscale.pytorch.world import World

Rows = tuple[tuple[int, ...], ...]
"""Ranks of each row, in order of position."""


@dataclass(frozen=True)
class Axis:
    """Ranks along one axis through this rank.

    Args:
        name: `row`, `column`, or `line` for all ranks of the world.
        ranks: global ranks in order of position; sorted in rows and columns.
    """

    name: str
    ranks: tuple[int, ...]
    position: int
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)

    def group_rank(self, position: int) -> int:
        """Return the rank of a position within the process group, which sorts its ranks."""
        return sorted(self.ranks).index(self.ranks[position])


@dataclass(frozen=True)
class Mesh:
    """Row and column of this rank."""

    row: Axis
    column: Axis
    rows: Rows

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and of ranks in each."""
        return len(self.rows), len(self.rows[0])

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the same groups as torch's DeviceMesh with axes `column` and `row`, for other libraries."""
        groups = [self.column.group, self.row.group]
        return DeviceMesh.from_group(groups, device_type, torch.tensor(self.rows), mesh_dim_names=("column", "row"))


def plan_rows(nodes: Sequence[int], row: int | None = None) -> Rows:
    """Cut a world into rows of `row` ranks (default: one row a node), given the node of each rank.

    Raises:
        InputError: Rows of equal length are not possible.
    """
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    lengths = {len(ranks) for ranks in by_node.values()}
    if row is None and len(lengths) > 1:
        counts = ", ".join(f"node {node}: {len(ranks)}" for node, ranks in sorted(by_node.items()))
        raise InputError(
            f"the nodes of this job run unequal numbers of ranks ({counts}), so they make no grid",
            field="train.all_reduce.row",
            got=None,
            hint=f"Start the same number on each, set this to a divisor of {len(nodes)}, or set "
            "train.all_reduce.algorithm to flat, ring or tree, which need no grid.",
        )
    length = row or lengths.pop()
    if len(nodes) % length:
        raise InputError(
            f"rows do not divide the {len(nodes)} ranks of the run",
            field="train.all_reduce.row",
            got=length,
            hint=f"Choose a divisor of {len(nodes)}.",
        )
    line = [rank for ranks in by_node.values() for rank in ranks]
    return tuple(tuple(sorted(line[start : start + length])) for start in range(0, len(line), length))


def build_mesh(world: World, row: int | None = None) -> Mesh:
    """Build the grid of a world (see `plan_rows`). Every rank must call this at the same time."""
    rows = plan_rows(world.nodes(), row)
    columns = [tuple(sorted(column)) for column in zip(*rows, strict=True)]
    return Mesh(_build_axis(world, "row", rows), _build_axis(world, "column", columns), rows)


def build_line(world: World) -> Axis:
    """Build the axis of all ranks of a world, node after node, so that a node has one neighbour on either side."""
    nodes = world.nodes()
    ranks = tuple(sorted(range(world.size), key=lambda rank: (nodes.index(nodes[rank]), rank)))
    return _build_axis(world, "line", [ranks])


def _build_axis(world: World, name: str, partition: Sequence[tuple[int, ...]]) -> Axis:
    line = next(ranks for ranks in partition if world.rank in ranks)
    return Axis(name, line, line.index(world.rank), world.build_group([list(ranks) for ranks in partition]))
