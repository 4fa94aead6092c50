"""The training loss."""

from torch import Tensor
from torch.nn import functional as F


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Mean cross entropy in fp32 against targets that spread `smoothing` over all classes (Szegedy 2016, section 7).

    logits: [n, classes] of any float type; labels: int64 [n].
    """
    return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
