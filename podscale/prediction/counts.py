"""Counts of predictions: images, failures by reason, and top-1 on labelled images."""

from collections import Counter
from collections.abc import Iterator

from podscale.prediction.predictor import Prediction
from podscale.util.formatting import format_count


class PredictionCounts:
    """Counts of the predictions that were added."""

    def __init__(self) -> None:
        self.images = self.labelled = self.correct = 0
        self.reasons: Counter[str] = Counter()

    def count(self, prediction: Prediction) -> None:
        """Count a prediction."""
        self.images += 1
        if prediction.failure is not None:
            self.reasons[prediction.failure.reason] += 1
        elif prediction.label is not None:
            self.labelled += 1
            self.correct += prediction.label == prediction.classes[0]

    @property
    def failures(self) -> int:
        return self.reasons.total()

    @property
    def accuracy(self) -> float | None:
        """Top-1 as a fraction of the labelled images that have a prediction; None without labels."""
        return self.correct / self.labelled if self.labelled else None

    def result_lines(self) -> Iterator[str]:
        """Yield a line on the accuracy, if there are labels, and one on the failures, if there are some."""
        if self.accuracy is not None:
            yield f"top-1 {self.accuracy:.2%} of {format_count(self.labelled, 'labelled image')}"
        if self.failures:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.reasons.items()))
            yield f"no prediction for {format_count(self.failures, 'image')}: {reasons}"
