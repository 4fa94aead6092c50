"""By size (Jia 2018): the hierarchy for small buckets, where latency counts, the ring for large ones.

The small tensors are fused into buckets before (the reducer does that). The paper's two thresholds, of fusing and of
choosing, are not known to us: ours are options of the run document.
"""

import torch
from torch import Tensor

from podscale.pytorch.allreduce.base import AllReduce


class HybridAllReduce:
    """`small` for buckets below `threshold` bytes of fp32, `large` for the others."""

    def __init__(self, small: AllReduce, large: AllReduce, threshold: int) -> None:
        self._small, self._large, self._threshold = small, large, threshold

    def __call__(self, bucket: Tensor) -> None:
        assert bucket.dtype == torch.float32
        (self._small if bucket.nbytes < self._threshold else self._large)(bucket)
