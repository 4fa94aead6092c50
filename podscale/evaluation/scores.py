"""Scores from predictions: accuracy, loss, per-class scores, confusion and calibration, all in float64."""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from podscale.errors import InputError
from podscale.runs.predictions import INVERSE_TEMPERATURES, Predictions

CALIBRATION_BINS = 15
CALIBRATION_SOURCE = "Guo et al. 2017, On Calibration of Modern Neural Networks, equations 3 and 5"


@dataclass(frozen=True)
class PerClassScores:
    """Scores of each class.

    Args:
        support: Samples of the class, int64 [classes].
        predicted: Samples predicted as the class, int64 [classes].
        correct: Samples of the class predicted as it, int64 [classes].
    """

    support: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    correct: npt.NDArray[np.int64]

    @property
    def accuracy(self) -> npt.NDArray[np.float64]:
        """Recall of each class, correct / support; NaN without samples."""
        return _ratio_or_nan(self.correct, self.support)

    @property
    def precision(self) -> npt.NDArray[np.float64]:
        """Precision of each class, correct / predicted; NaN if it was never predicted."""
        return _ratio_or_nan(self.correct, self.predicted)


@dataclass(frozen=True)
class ConfusionCounts:
    """Sparse confusion matrix: the pairs that occur, ordered by label, then prediction.

    Args:
        label: True class, int32 [m].
        predicted: Predicted class, int32 [m].
        count: Samples of the pair, int64 [m].
    """

    classes: int
    label: npt.NDArray[np.int32]
    predicted: npt.NDArray[np.int32]
    count: npt.NDArray[np.int64]

    def matrix(self) -> npt.NDArray[np.int64]:
        """Return the dense matrix, int64 [classes, classes]; rows are true classes, columns predictions."""
        dense = np.zeros((self.classes, self.classes), dtype=np.int64)
        dense[self.label, self.predicted] = self.count
        return dense

    def most_frequent(self, limit: int) -> list[tuple[int, int, int]]:
        """Return the most frequent mistakes as (label, predicted, count), ties by class index."""
        wrong = np.flatnonzero(self.label != self.predicted)
        order = wrong[np.argsort(-self.count[wrong], kind="stable")][:limit]
        return [(int(self.label[i]), int(self.predicted[i]), int(self.count[i])) for i in order]


@dataclass(frozen=True)
class Calibration:
    """Calibration in M equal-width bins over top-1 confidence, ((m - 1) / M, m / M] (Guo et al. 2017, section 3).

    Args:
        count: Samples of each bin, int64 [M].
        confidence: Mean confidence of each bin, float64 [M]; NaN if it is empty.
        accuracy: Accuracy of each bin, float64 [M]; NaN if it is empty.
        ece: Expected calibration error, sum over bins of count / n * |accuracy - confidence| (equations 3 and 5).
        temperature: Divisor of the logits with the least mean cross-entropy (section 4.2); None if it is not known.
    """

    count: npt.NDArray[np.int64]
    confidence: npt.NDArray[np.float64]
    accuracy: npt.NDArray[np.float64]
    ece: float
    temperature: float | None = None

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """Bin edges, float64 [M + 1]."""
        return bin_edges(len(self.count))


@dataclass(frozen=True)
class Scores:
    """Scores of a model on one split.

    Args:
        count: Number of samples.
        classes: Number of classes.
        top1: Fraction of samples, 0 to 1.
        top1_interval: 95 % Wilson score interval of top1 (Wilson 1927).
        top5: Fraction of samples whose label is among the `top5_k` most probable classes.
        top5_k: 5, or the number of classes if that is less.
        loss: Mean cross-entropy, nats.
        balanced_accuracy: Mean accuracy over classes that have samples.
    """

    count: int
    classes: int
    top1: float
    top1_interval: tuple[float, float]
    top5: float
    top5_k: int
    loss: float
    balanced_accuracy: float
    per_class: PerClassScores
    confusion: ConfusionCounts
    calibration: Calibration


def compute_scores(predictions: Predictions, classes: int) -> Scores:
    """Compute the scores over `classes` classes.

    Raises:
        InputError: There are no predictions, or they belong to another class map.
    """
    _check_classes(predictions, classes)
    n = len(predictions)
    labels = predictions.labels.astype(np.int64)
    predicted = predictions.topk[:, 0].astype(np.int64)
    is_correct = predicted == labels
    calibration = _compute_calibration(predictions.confidences[:, 0].astype(np.float64), is_correct)
    k = min(5, classes)
    per_class = PerClassScores(
        support=np.bincount(labels, minlength=classes),
        predicted=np.bincount(predicted, minlength=classes),
        correct=np.bincount(labels[is_correct], minlength=classes),
    )
    return Scores(
        count=n,
        classes=classes,
        top1=float(is_correct.mean(dtype=np.float64)),
        top1_interval=wilson_interval(int(is_correct.sum()), n),
        top5=float((predictions.topk[:, :k] == labels[:, None]).any(axis=1).mean(dtype=np.float64)),
        top5_k=k,
        loss=float(predictions.losses.mean(dtype=np.float64)),
        balanced_accuracy=float(np.nanmean(per_class.accuracy)),
        per_class=per_class,
        confusion=_count_confusion(labels, predicted, classes),
        calibration=replace(calibration, temperature=fit_temperature(predictions.tempered_losses)),
    )


def fit_temperature(tempered_losses: npt.NDArray[np.float32] | None) -> float | None:
    """Return the temperature of the least mean loss; None if it is outside of the stored ones or nothing is stored.

    The mean is convex in the factor of the logits, so the least stored one is beside the minimum, which is that of the
    parabola through it and its neighbours, over the logarithm of the factor.

    Args:
        tempered_losses: float32 [n, 25], losses of n samples at INVERSE_TEMPERATURES; None if there are none.
    """
    if tempered_losses is None:
        return None
    means = tempered_losses.mean(axis=0, dtype=np.float64)
    least = int(np.argmin(means))
    if not np.isfinite(means).all() or least in (0, len(means) - 1):
        return None
    left, middle, right = means[least - 1 : least + 2]
    curvature = left - 2 * middle + right
    offset = (left - right) / (2 * curvature) if curvature > 0 else 0.0
    step = math.log(INVERSE_TEMPERATURES[1] / INVERSE_TEMPERATURES[0])
    return math.exp(-offset * step) / float(INVERSE_TEMPERATURES[least])


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of correct / n (Wilson 1927)."""
    z, fraction = 1.959963984540054, correct / n  # z is the normal quantile
    center = fraction + z * z / (2 * n)
    half_width = z * math.sqrt(fraction * (1 - fraction) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (center - half_width) / scale), min(1.0, (center + half_width) / scale)


def bin_edges(bins: int) -> npt.NDArray[np.float64]:
    """Return the edges of equal-width bins over [0, 1], float64 [bins + 1]."""
    return np.arange(bins + 1, dtype=np.float64) / bins


def most_confident_mistakes(predictions: Predictions, limit: int) -> npt.NDArray[np.int64]:
    """Return the rows of wrong predictions, most confident first, ties by key."""
    wrong = np.flatnonzero(predictions.topk[:, 0] != predictions.labels)
    order = np.lexsort((predictions.keys[wrong], -predictions.confidences[wrong, 0].astype(np.float64)))
    return wrong[order][:limit]


def _check_classes(predictions: Predictions, classes: int) -> None:
    if len(predictions) == 0:
        problem = "empty, because the validation split has no samples"
        raise InputError(problem, field="predictions")
    for name, values in (("labels", predictions.labels), ("topk", predictions.topk)):
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= classes:
            raise InputError(
                f"there are only {classes} classes: the predictions belong to another shard set",
                field=f"predictions.{name}",
                got=low if low < 0 else high,
                hint="Run `podscale evaluate` again.",
            )
    if predictions.topk.shape[1] < min(5, classes):
        raise InputError(
            f"too few classes are kept for a top-5, which needs {min(5, classes)}",
            field="predictions.topk",
            got=predictions.topk.shape[1],
            hint="Run `podscale evaluate` again.",
        )


def _count_confusion(labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], classes: int) -> ConfusionCounts:
    pairs, counts = np.unique(labels * classes + predicted, return_counts=True)
    return ConfusionCounts(
        classes, (pairs // classes).astype(np.int32), (pairs % classes).astype(np.int32), counts.astype(np.int64)
    )


def _compute_calibration(confidence: npt.NDArray[np.float64], is_correct: npt.NDArray[np.bool_]) -> Calibration:
    bin_of = np.searchsorted(bin_edges(CALIBRATION_BINS)[1:-1], confidence, side="left")
    count = np.bincount(bin_of, minlength=CALIBRATION_BINS)
    correct = np.bincount(bin_of, weights=is_correct, minlength=CALIBRATION_BINS)
    confidence_sum = np.bincount(bin_of, weights=confidence, minlength=CALIBRATION_BINS)
    ece = float(np.abs(correct - confidence_sum).sum() / len(confidence))  # the bin's count cancels out
    return Calibration(count, _ratio_or_nan(confidence_sum, count), _ratio_or_nan(correct, count), ece)


def _ratio_or_nan(part: npt.NDArray[np.generic], total: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return part / total, or NaN if total is 0."""
    with np.errstate(invalid="ignore"):
        return np.asarray(part, dtype=np.float64) / np.where(total == 0, np.nan, total)
