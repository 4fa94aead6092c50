"""Agreement of an exported file with the model in PyTorch, on the same images."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from podscale.data.decode import Pixels
from podscale.errors import PodscaleError
from podscale.export.image_sample import ImageSample
from podscale.prediction.model import Classifier
from podscale.prediction.probabilities import softmax

TOLERANCE = 1e-4
"""Largest difference of an fp32 file: of a probability, and of a log-probability as a fraction of the largest."""
BATCH = 32
"""Images of a batch; the first batch has one image, so that the batch is seen to be dynamic."""

LogProbabilities = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Agreement:
    """Comparison of a file with a reference on some images.

    Args:
        images: number of images.
        source: their origin, for users.
        largest_difference: of a probability, over all images and classes.
        largest_log_difference: of a log-probability, as a fraction of the largest one in the reference; None if the
            file's outputs are probabilities.
        top1_equal: images with the same most probable class.
        near_ties: other images, whose two best classes differ by less than the tolerance in the reference.
        reference_top1: correct images of the reference as a fraction; None without labels.
        top1: correct images of the file as a fraction; None without labels.
    """

    images: int
    source: str
    largest_difference: float
    largest_log_difference: float | None
    top1_equal: int
    near_ties: int
    reference_top1: float | None
    top1: float | None

    def check(self, field: str) -> None:
        """Raise PodscaleError if the file differs by more than the tolerance."""
        worst = max(self.largest_difference, self.largest_log_difference or 0.0)
        different = self.images - self.top1_equal - self.near_ties
        if not worst <= TOLERANCE or different:
            raise PodscaleError(
                f"the exported file differs from the model: by {worst:.1e} at most (tolerance {TOLERANCE:.0e}), with "
                f"another class for {different} of {self.images} images",
                field=field,
                hint="Nothing was written. Export in another format, and report this.",
            )


def log_probabilities(classifier: Classifier, images: Pixels) -> LogProbabilities:
    """Return the classifier's log-probabilities, float32 [n, classes], computed in batches of different sizes."""
    return np.concatenate([classifier.log_probabilities(images[part]) for part in _batches(len(images))])


def compare(
    reference: LogProbabilities,
    outputs: LogProbabilities,
    sample: ImageSample,
    temperature: float,
    *,
    with_logits: bool,
) -> Agreement:
    """Compare log-probabilities, float32 [n, classes], with those of the reference.

    Args:
        temperature: divisor of the logits in the probabilities.
        with_logits: the file's outputs are logits, so that the log-probabilities of all classes are exact.
    """
    expected, probabilities = softmax(reference, temperature), softmax(outputs, temperature)
    log_difference = float(np.abs(outputs - reference).max() / max(1.0, float(np.abs(reference).max())))
    best, other = reference.argmax(axis=1), outputs.argmax(axis=1)
    is_equal = best == other
    margins = np.abs(np.diff(np.partition(expected, -2, axis=1)[:, -2:], axis=1))[:, 0]
    labels = sample.labels
    return Agreement(
        images=len(sample),
        source=sample.source,
        largest_difference=float(np.abs(probabilities - expected).max()),
        largest_log_difference=log_difference if with_logits else None,
        top1_equal=int(is_equal.sum()),
        near_ties=int((~is_equal & (margins < TOLERANCE)).sum()),
        reference_top1=None if labels is None else float((best == labels).mean()),
        top1=None if labels is None else float((other == labels).mean()),
    )


def _batches(count: int) -> Iterator[slice]:
    yield slice(0, 1)
    for begin in range(1, count, BATCH):
        yield slice(begin, min(begin + BATCH, count))
