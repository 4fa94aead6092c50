"""The training loss."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from podscale.config import RunConfig
from podscale.pytorch.models import Heads, Outputs


@dataclass(frozen=True)
class Loss:
    """The mean training loss of a network's outputs, fp32.

    smoothing: mass of the target spread over all classes. auxiliary: weight of an auxiliary head's loss.
    """

    smoothing: float
    auxiliary: float = 0.0

    def __call__(self, outputs: Outputs, labels: Tensor) -> Tensor:
        """outputs: of n images; labels: int64 [n]."""
        if isinstance(outputs, Heads):
            return self._of(outputs.logits, labels) + self.auxiliary * self._of(outputs.auxiliary, labels)
        return self._of(outputs, labels)

    def _of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return smoothed_cross_entropy(logits, labels, self.smoothing)


def build_loss(config: RunConfig) -> Loss:
    """The loss of a document."""
    return Loss(config.train.label_smoothing, config.model.inception.auxiliary)


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Mean cross entropy in fp32 against targets that spread `smoothing` over all classes (Szegedy 2016, section 7).

    logits: [n, classes] of any float type; labels: int64 [n].
    """
    return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
