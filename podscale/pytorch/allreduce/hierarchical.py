"""All-reduce by masters (Jia 2018): reduce to one rank of each row, ring among those, broadcast inside the row.

With p ranks in rows of k the paper counts 4 (k - 1) + 2 (p/k - 1) steps, where a ring takes 2 (p - 1): for small
messages, whose time is latency, that is what matters. Ours takes 2 (k - 1) steps in the rows instead of 4 (k - 1),
since segments go along a chain. A master's link carries all of the row's data, so for large messages the torus, whose
links share it, is the better one.
"""

import torch
from torch import Tensor

from podscale.pytorch.allreduce.collectives import build_collectives
from podscale.pytorch.allreduce.order import equal_spans
from podscale.pytorch.allreduce.pipeline import build_slice_queue, run_pipelined, slice_count
from podscale.pytorch.mesh import Mesh


class HierarchicalAllReduce:
    """The master of a row is its place 0."""

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        wire_row: torch.dtype = torch.float32,
        wire_column: torch.dtype = torch.float32,
    ) -> None:
        self._mesh, self._is_master = mesh, mesh.row.position == 0
        self._ranks = mesh.row.size * mesh.column.size
        self._row = build_collectives(mesh.row, wire_row, device)
        self._column = build_collectives(mesh.column, wire_column, device)
        self._slice_queue = build_slice_queue(device)

    def __call__(self, bucket: Tensor) -> None:
        bucket.mul_(1.0 / self._ranks)
        cuts = equal_spans(len(bucket), slice_count(len(bucket), self._mesh.shape, bucket.device.type))
        slices = [bucket[start:stop] for start, stop in cuts]

        def across(number: int) -> None:
            if self._is_master:
                self._column.all_reduce(slices[number])

        run_pipelined(
            self._slice_queue,
            len(slices),
            lambda number: self._row.reduce(slices[number]),
            across,
            lambda number: self._row.broadcast(slices[number]),
        )
