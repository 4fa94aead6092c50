"""What a network with an auxiliary head says in training."""

from typing import NamedTuple

from torch import Tensor


class InceptionOutputs(NamedTuple):
    """logits: of the head that counts. auxiliary: of the other one. Both float [n, classes]."""

    logits: Tensor
    auxiliary: Tensor


Outputs = Tensor | InceptionOutputs
"""What a network returns: logits, or in training those of both heads. Evaluation never sees an auxiliary head."""
