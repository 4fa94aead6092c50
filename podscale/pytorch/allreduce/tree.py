"""Two binary trees over all ranks, each with half of the data (Sanders 2009; NCCL uses the like since 2.4).

Sums climb to the roots and come down again in a pipeline of segments: the latency grows with log2 of the ranks where
a ring's grows with the ranks, and the error of a sum in low precision likewise. A rank is an inner node of one tree
and a leaf of the other, so that all links carry their share.
"""

import torch
from torch import Tensor

from podscale.pytorch.allreduce.collectives import SEGMENT_ELEMENTS
from podscale.pytorch.allreduce.messages import build_transport
from podscale.pytorch.allreduce.plan import double_tree
from podscale.pytorch.mesh import Axis


class DoubleTreeAllReduce:
    """The double tree along an axis with all ranks on it."""

    def __init__(self, line: Axis, device: torch.device, wire: torch.dtype = torch.float32) -> None:
        self._line = line
        self._transport = build_transport(line, wire, device)
        self._segment = SEGMENT_ELEMENTS[device.type]

    def __call__(self, bucket: Tensor) -> None:
        plan = double_tree(self._line.position, self._line.size, len(bucket), self._segment)
        self._transport.run(plan, bucket.mul_(1.0 / self._line.size))
