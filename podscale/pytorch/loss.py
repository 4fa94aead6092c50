"""The training loss."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from podscale.config import RunConfig
from podscale.pytorch.models import InceptionOutputs, Outputs


@dataclass(frozen=True)
class TrainingLoss:
    """The mean training loss of a network's outputs, fp32.

    smoothing: mass of the target spread over all classes. auxiliary: weight of an auxiliary head's loss. binary: one
    yes or no for each class instead of one choice among them (Wightman 2021), the mean over classes; with a
    `threshold`, targets above it count as 1 and others as 0.
    """

    smoothing: float
    auxiliary: float = 0.0
    binary: bool = False
    threshold: float | None = None

    def __call__(self, outputs: Outputs, labels: Tensor, share: Tensor | None = None) -> Tensor:
        """outputs: of n images; labels: int64 [n]. share: scalar, the weight of each image's own label where images
        are mixed; the rest is that of its counterpart from the end."""
        if isinstance(outputs, InceptionOutputs):
            return self._of(outputs.logits, labels, share) + self.auxiliary * self._of(outputs.auxiliary, labels, share)
        return self._of(outputs, labels, share)

    def _of(self, logits: Tensor, labels: Tensor, share: Tensor | None) -> Tensor:
        if self.binary:
            targets = self._targets(labels, logits.shape[1], share)
            return F.binary_cross_entropy_with_logits(logits.float(), targets)
        own = smoothed_cross_entropy(logits, labels, self.smoothing)
        if share is None:
            return own
        return share * own + (1 - share) * smoothed_cross_entropy(logits, labels.flip(0), self.smoothing)

    def _targets(self, labels: Tensor, classes: int, share: Tensor | None) -> Tensor:
        targets = (labels[:, None] == torch.arange(classes, device=labels.device)).float()
        if share is not None:
            targets = share * targets + (1 - share) * targets.flip(0)
        targets = (1 - self.smoothing) * targets + self.smoothing / classes
        return targets if self.threshold is None else torch.gt(targets, self.threshold).float()


def build_loss(config: RunConfig) -> TrainingLoss:
    """The loss of a document."""
    train = config.train
    binary = train.loss == "binary_cross_entropy"
    return TrainingLoss(train.label_smoothing, config.model.inception.auxiliary, binary, train.binary_threshold)


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Mean cross entropy in fp32 against targets that spread `smoothing` over all classes (Szegedy 2016, section 7).

    logits: [n, classes] of any float type; labels: int64 [n].
    """
    return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
