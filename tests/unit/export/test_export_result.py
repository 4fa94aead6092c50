"""Comparison of log-probabilities: tolerance, near ties, accuracy, and outputs that are not numbers."""

import numpy as np
import pytest

from podscale.errors import PodscaleError
from podscale.export.export_result import TOLERANCE, Agreement, compare, log_probabilities
from podscale.export.image_sample import ImageSample, sample_items
from podscale.prediction.exported_file import log_softmax
from podscale.prediction.image_inputs import ImageItem

LOGITS = np.array([[4, 1, 0], [0, 2, 1], [1, 1.00001, -3], [0, 0, 5]], dtype=np.float32)
LABELS = np.array([0, 1, 0, 0])


def agreement_of(change: np.ndarray, *, temperature: float = 1.0, with_logits: bool = True) -> Agreement:
    sample = ImageSample(np.zeros((4, 2, 2, 3), np.uint8), LABELS, "test")
    outputs = log_softmax(LOGITS + change.astype(np.float32))
    return compare(log_softmax(LOGITS), outputs, sample, temperature, with_logits=with_logits)


def test_the_model_itself_agrees() -> None:
    agreement = agreement_of(np.zeros((4, 3)))
    assert (agreement.largest_difference, agreement.largest_log_difference) == (0, 0)
    assert (agreement.top1_equal, agreement.near_ties) == (4, 0)
    assert (agreement.reference_top1, agreement.top1) == (0.5, 0.5)
    agreement.check("model.onnx")


def test_another_class_of_a_near_tie_is_counted_and_accepted() -> None:
    agreement = agreement_of(np.array([[0, 0, 0], [0, 0, 0], [2e-5, 0, 0], [0, 0, 0]]))
    assert (agreement.top1_equal, agreement.near_ties, agreement.top1) == (3, 1, 0.75)
    agreement.check("model.onnx")


@pytest.mark.parametrize("size", [0.9 * TOLERANCE, 1.1 * TOLERANCE])
def test_the_tolerance_is_of_probabilities_and_of_logits(size: float) -> None:
    """A change of an improbable class is seen in logits alone; the largest log-probability is 5.0."""
    change = np.zeros((4, 3))
    change[3, 0] = 5.0 * size
    assert agreement_of(change).largest_log_difference == pytest.approx(size, rel=0.05)
    agreement_of(change, with_logits=False).check("model.onnx")
    if size < TOLERANCE:
        agreement_of(change).check("model.onnx")
    else:
        with pytest.raises(PodscaleError):
            agreement_of(change).check("model.onnx")


def test_differences_are_at_the_temperature() -> None:
    change = np.zeros((4, 3))
    change[2, 2] = 0.5
    assert agreement_of(change, temperature=4.0).largest_difference > agreement_of(change).largest_difference


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_outputs_that_are_no_numbers_are_refused(value: float) -> None:
    change = np.zeros((4, 3))
    change[1, 1] = value
    with np.errstate(invalid="ignore"), pytest.raises(PodscaleError):
        agreement_of(change, with_logits=False).check("model.onnx")


def test_another_class_is_refused() -> None:
    with pytest.raises(PodscaleError):
        agreement_of(np.array([[0, 4, 0], *[[0, 0, 0]] * 3])).check("model.onnx")


def test_batches_have_different_sizes_and_all_images() -> None:
    sizes: list[int] = []

    class Counting:
        def log_probabilities(self, images: np.ndarray) -> np.ndarray:
            sizes.append(len(images))
            return images[:, 0, 0, :].astype(np.float32)

    images = np.arange(70 * 3, dtype=np.uint8).reshape(70, 1, 1, 3)
    np.testing.assert_array_equal(log_probabilities(Counting(), images), images[:, 0, 0, :])
    assert sizes == [1, 32, 32, 5]


def test_samples_are_random_repeatable_and_in_order() -> None:
    items = [ImageItem(str(number), number) for number in range(1000)]
    chosen = [item.source for item in sample_items(iter(items), 100)]
    assert chosen == sorted(set(chosen)) == [item.source for item in sample_items(iter(items), 100)]
    assert len(chosen) == 100
    assert 400 < np.mean(chosen) < 600
    assert [item.source for item in sample_items(iter(items[:3]), 100)] == [0, 1, 2]
