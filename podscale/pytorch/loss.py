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

    label_smoothing: mass of the target spread over all classes. auxiliary_weight: weight of an auxiliary head's loss.
    is_binary: one yes or no for each class instead of one choice among them (Wightman 2021), the mean over classes;
    with a `threshold`, targets above it count as 1 and others as 0.
    """

    label_smoothing: float
    auxiliary_weight: float = 0.0
    is_binary: bool = False
    threshold: float | None = None

    def __call__(self, outputs: Outputs, labels: Tensor, mix_weight: Tensor | None = None) -> Tensor:
        """outputs: of n images; labels: int64 [n]. mix_weight: scalar, the weight of each image's own label where
        images are mixed; the rest is that of its counterpart from the end."""
        if isinstance(outputs, InceptionOutputs):
            return self._head_loss(outputs.logits, labels, mix_weight) + self.auxiliary_weight * self._head_loss(
                outputs.auxiliary, labels, mix_weight
            )
        return self._head_loss(outputs, labels, mix_weight)

    def _head_loss(self, logits: Tensor, labels: Tensor, mix_weight: Tensor | None) -> Tensor:
        if self.is_binary:
            targets = self._binary_targets(labels, logits.shape[1], mix_weight)
            return F.binary_cross_entropy_with_logits(logits.float(), targets)
        own = smoothed_cross_entropy(logits, labels, self.label_smoothing)
        if mix_weight is None:
            return own
        return mix_weight * own + (1 - mix_weight) * smoothed_cross_entropy(
            logits, labels.flip(0), self.label_smoothing
        )

    def _binary_targets(self, labels: Tensor, classes: int, mix_weight: Tensor | None) -> Tensor:
        targets = (labels[:, None] == torch.arange(classes, device=labels.device)).float()
        if mix_weight is not None:
            targets = mix_weight * targets + (1 - mix_weight) * targets.flip(0)
        targets = (1 - self.label_smoothing) * targets + self.label_smoothing / classes
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
