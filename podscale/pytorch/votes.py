"""What several models say together: their logits on the same batches, and the two ways of averaging them.

Of both ways no paper of ours is verified to be the published one; both are computed, and the report shows both.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from podscale.data.loaders.base import Batch
from podscale.pytorch.evaluate import PredictionColumns, batch_predictions, prediction_columns


@dataclass
class _BatchSums:
    """Of one batch: what identifies its rows, and fp32 [n, classes] over the members so far, in host memory."""

    rows: Batch
    logits: Tensor
    log_probabilities: Tensor
    """Logarithm of the sum of the probabilities, which never underflows."""


class LogitAverage:
    """Sums over members; every member must bring the same batches in the same order.

    Two fp32 values for each sample of this rank and class: 0.4 GB for all of ImageNet's validation split.
    """

    def __init__(self) -> None:
        self._batches: list[_BatchSums] = []
        self._members = self._position = 0

    def start_member(self) -> None:
        """Another member is about to bring its batches."""
        self._members += 1
        self._position = 0

    def add(self, batch: Batch, logits: Tensor) -> None:
        """The next batch of this member; logits: [n, classes]."""
        logits = logits.float().cpu()
        log_probabilities = F.log_softmax(logits, dim=1)
        if self._members == 1:
            rows = Batch(None, batch.labels, batch.keys, batch.weights, batch.step)
            self._batches.append(_BatchSums(rows, logits, log_probabilities))
        else:
            sums = self._batches[self._position]
            assert (sums.rows.keys == batch.keys).all(), "another order of samples"
            sums.logits += logits
            sums.log_probabilities = torch.logaddexp(sums.log_probabilities, log_probabilities)
        self._position += 1

    def columns(self, way: Literal["probabilities", "logits"]) -> list[PredictionColumns]:
        """The answers of all members together, batch by batch."""
        return [
            prediction_columns(s.rows, batch_predictions(self._mean(s, way), torch.from_numpy(s.rows.labels)))
            for s in self._batches
        ]

    def _mean(self, sums: _BatchSums, way: Literal["probabilities", "logits"]) -> Tensor:
        """Mean logits, or the logarithm of mean probabilities, which are logits of them."""
        if way == "logits":
            return sums.logits / self._members
        return sums.log_probabilities - math.log(self._members)
