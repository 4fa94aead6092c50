"""2-D torus all-reduce on a grid of ranks: along the rows, the columns, the rows (Ying 2018; Mikami 2018).

Each rank reduce-scatters its bucket inside its row, all-reduces its shard along its column and all-gathers inside the
row. With n ranks in a row, a slow link between rows carries 1/n of the data. If rows are nodes, NCCL's users call this
algorithm hierarchical.

A step that is sharded over all ranks needs no all-reduce along the column: a second reduce-scatter leaves each rank
1/ranks of the bucket. The columns carry the same bytes, but half of them after the step.
"""

import torch
from torch import Tensor

from podscale.pytorch.all_reduce.algorithms import GridAllReduce, ShardedAllReduce
from podscale.pytorch.all_reduce.collectives import all_gather_tensor
from podscale.pytorch.all_reduce.plan import Span, equal_spans
from podscale.pytorch.all_reduce.wire_formats import WireFormat
from podscale.pytorch.comm_queue import run_pipelined, slice_count
from podscale.pytorch.mesh import Mesh


def slice_spans(length: int, shards: int, slices: int) -> list[list[Span]]:
    """Cut every shard of a bucket into `slices` spans. Returns a list for each slice: its span of each shard.

    Slices are the units of the pipeline. Shard bounds do not depend on their number.
    """
    by_shard = [equal_spans(stop - start, slices, start) for start, stop in equal_spans(length, shards)]
    return [list(spans) for spans in zip(*by_shard, strict=True)]


class Torus2DAllReduce(GridAllReduce, ShardedAllReduce):
    """2-D torus all-reduce. It has one shard per position of the row.

    `wires` are the formats of messages along the rows and along the columns; default: fp32.
    """

    def __init__(self, mesh: Mesh, device: torch.device, *wires: WireFormat) -> None:
        super().__init__(mesh, device, *wires)
        self.shards, self.shard = mesh.row.size, mesh.row.position

    def reduce_scatter(self, bucket: Tensor) -> Tensor:
        self._reduce(bucket, gather=False)
        start, stop = equal_spans(len(bucket), self.shards)[self.shard]
        return bucket[start:stop].clone()

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        all_gather_tensor(out, shard, group=self._mesh.row.group)

    def __call__(self, bucket: Tensor) -> None:
        self._reduce(bucket, gather=True)

    def _reduce(self, bucket: Tensor, *, gather: bool) -> None:
        bucket.mul_(1.0 / self._ranks)
        row = self._mesh.row
        spans = slice_spans(len(bucket), row.size, slice_count(len(bucket), self._mesh.shape, bucket.device.type))

        def inward(number: int) -> None:
            self._row.reduce_scatter(bucket, spans[number])

        def across(number: int) -> None:
            start, stop = spans[number][row.position]
            self._column.all_reduce(bucket[start:stop])

        def outward(number: int) -> None:
            self._row.all_gather(bucket, spans[number])

        run_pipelined(self._column_queue, len(spans), inward, across, outward if gather else None)


class WorldTorus2DAllReduce(Torus2DAllReduce):
    """2-D torus all-reduce with one shard for each rank of the grid.

    Shard p * columns + q is part q of the row's part p, with `columns` the ranks of a column.
    """

    def __init__(self, mesh: Mesh, device: torch.device, *wires: WireFormat) -> None:
        super().__init__(mesh, device, *wires)
        self.shards = mesh.row.size * mesh.column.size
        self.shard = mesh.row.position * mesh.column.size + mesh.column.position

    def reduce_scatter(self, bucket: Tensor) -> Tensor:
        """Return this rank's shard of the mean of `bucket`, fp32 [elements].

        A slice of the pipeline has a span of every shard. Overwrites `bucket`.
        """
        row, column = self._mesh.row, self._mesh.column
        grid = bucket.mul_(1.0 / self._ranks).view(self.shards, -1)
        spans = equal_spans(grid.shape[1], slice_count(len(bucket), self._mesh.shape, bucket.device.type))
        spans = [(start, stop) for start, stop in spans if start < stop]
        packed = [grid[:, start:stop].reshape(row.size, -1) for start, stop in spans]  # by part of the row
        shard = bucket.new_empty(grid.shape[1])

        def inward(number: int) -> None:
            flat = packed[number].view(-1)
            self._row.reduce_scatter(flat, equal_spans(len(flat), row.size))

        def across(number: int) -> None:
            part = packed[number][row.position]
            parts = equal_spans(len(part), column.size)
            self._column.reduce_scatter(part, parts)
            shard[slice(*spans[number])].copy_(part[slice(*parts[column.position])])

        run_pipelined(self._column_queue, len(spans), inward, across, None)
        return shard

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        start, stop = equal_spans(len(out), self._mesh.row.size)[self._mesh.row.position]
        all_gather_tensor(out[start:stop], shard, group=self._mesh.column.group)
        super().all_gather(out[start:stop], out)
