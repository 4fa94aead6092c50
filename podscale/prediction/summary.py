"""Summary of a prediction: counts, accuracy on labelled images, and the few images that its page shows."""

import heapq
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from podscale.prediction.image_inputs import ImageItem
from podscale.prediction.predictor import Prediction, Predictor
from podscale.prediction.reservoir import Reservoir
from podscale.util.formatting import format_count

MAX_PICTURES = 120
"""Pictures of a page; of more images, a random sample."""
MAX_DOUBTFUL = 24
"""Pictures with the least probable first class, if there are more images than MAX_PICTURES."""
MAX_FAILURES = 50
"""Failures that a page lists."""
CONVERTIBLE = {"unusable_format", "unusable_depth"}
"""Reasons of images that conversion makes usable, as a rule."""


class ShownImage(NamedTuple):
    """Image on the page, by its number in the list, from 0."""

    number: int
    item: ImageItem
    prediction: Prediction


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


class PredictionSummary(PredictionCounts):
    """Counts of a prediction so far; with `pictures`, also the images for a page, in bounded memory."""

    def __init__(self, predictor: Predictor, *, pictures: bool = False) -> None:
        super().__init__()
        self.predictor, self.pictures = predictor, pictures
        self.classes: Counter[str] = Counter()
        self.failed: list[Prediction] = []
        self._sample = Reservoir[ShownImage](MAX_PICTURES)
        self._doubtful: list[tuple[float, int, ShownImage]] = []
        self._started = time.monotonic()

    def add(self, item: ImageItem, prediction: Prediction) -> None:
        """Count a prediction, and keep its image if the page may show it."""
        self.count(prediction)
        if prediction.failure is not None:
            if len(self.failed) < MAX_FAILURES:
                self.failed.append(prediction)
            return
        self.classes[prediction.classes[0]] += 1
        if self.pictures:
            self._keep(ShownImage(self.images - 1, item, prediction))

    @property
    def seconds(self) -> float:
        """Seconds since the prediction began."""
        return time.monotonic() - self._started

    @property
    def sample(self) -> list[ShownImage]:
        """Random images that have a prediction, at most MAX_PICTURES."""
        return self._sample.items

    @property
    def doubtful(self) -> list[ShownImage]:
        """Images with the least probable first class, least first; empty if the sample has all images."""
        if self.images - self.failures <= MAX_PICTURES:
            return []
        return [image for _, _, image in sorted(self._doubtful, reverse=True)]

    @property
    def calibration(self) -> str:
        """Kind of the probabilities, for users."""
        temperature = self.predictor.model.temperature
        if temperature is not None:
            return f"calibrated by temperature {temperature:.3f}, fitted on the validation split"
        return "plain softmax, not calibrated"

    def to_text(self) -> str:
        """Return the summary in one or more lines for the terminal."""
        seconds = self.seconds
        lines = [f"{format_count(self.images, 'image')} in {seconds:.1f} s, {self.images / seconds:,.1f} images/s"]
        lines.append(f"probabilities: {self.calibration}")
        lines += self.result_lines()
        if self.reasons.keys() & CONVERTIBLE and not self.predictor.options.convert:
            lines.append("--convert predicts images of other formats and depths too")
        return "\n".join(lines)

    def _keep(self, image: ShownImage) -> None:
        """Keep a uniform sample and the most doubtful images."""
        self._sample.add(image)
        entry = (-image.prediction.probabilities[0], -image.number, image)
        if len(self._doubtful) < MAX_DOUBTFUL:
            heapq.heappush(self._doubtful, entry)
        else:
            heapq.heappushpop(self._doubtful, entry)
