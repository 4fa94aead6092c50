"""Scores against oracles written another way: loops in exact fractions, scikit-learn, and the papers' own formulas."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.evaluation.scores import compute_scores, fit_temperature, most_confident_mistakes, wilson_interval
from podscale.runs.predictions import INVERSE_TEMPERATURES, PREDICTION_COLUMNS, Predictions
from tests.support.refusals import refused


def from_logits(logits: np.ndarray, labels: np.ndarray, k: int = 5) -> Predictions:
    """Return the predictions of an engine for these logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    topk = np.argsort(-log_p, axis=1, kind="stable")[:, : min(k, logits.shape[1])]
    return Predictions(
        keys=np.arange(len(labels), dtype=np.uint64),
        labels=labels.astype(np.int32),
        topk=topk.astype(np.int32),
        confidences=np.exp(np.take_along_axis(log_p, topk, axis=1)).astype(np.float32),
        losses=-log_p[np.arange(len(labels)), labels].astype(np.float32),
    )


def random_case(n: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray, Predictions]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes)) * 2
    logits[np.arange(n), labels] += rng.normal(2, 2, n)
    return logits, labels, from_logits(logits, labels)


@pytest.mark.parametrize(("n", "classes"), [(500, 10), (300, 3), (5000, 1000), (40, 2)])
def test_against_scikit_learn(n: int, classes: int) -> None:
    from sklearn import metrics  # imported here, because it takes seconds in every process that only collects this test

    logits, labels, predictions = random_case(n, classes, seed=classes)
    scores = compute_scores(predictions, classes)
    predicted = logits.argmax(axis=1)
    everything = np.arange(classes)
    assert scores.top1 == pytest.approx((predicted == labels).mean(), abs=1e-15)
    if classes > 5:
        assert scores.top5 == pytest.approx(
            metrics.top_k_accuracy_score(labels, logits, k=5, labels=everything), abs=1e-15
        )
    np.testing.assert_array_equal(
        scores.confusion.matrix(), metrics.confusion_matrix(labels, predicted, labels=everything)
    )
    recall = metrics.recall_score(labels, predicted, labels=everything, average=None, zero_division=np.nan)
    precision = metrics.precision_score(labels, predicted, labels=everything, average=None, zero_division=np.nan)
    np.testing.assert_allclose(scores.per_class.accuracy, recall, rtol=1e-15)
    np.testing.assert_allclose(scores.per_class.precision, precision, rtol=1e-15)
    with np.errstate(all="ignore"):
        assert scores.balanced_accuracy == pytest.approx(metrics.balanced_accuracy_score(labels, predicted), rel=1e-12)


def exact_ece(confidences: list[float], right: list[bool], bins: int) -> Fraction:
    """Guo et al. 2017 equations 3 and 5, sample by sample in exact arithmetic; bin m is ((m-1)/M, m/M]."""
    total = Fraction(0)
    for m in range(1, bins + 1):
        inside = [
            i
            for i, c in enumerate(confidences)
            if (m == 1 and c == 0) or Fraction(m - 1, bins) < Fraction(c) <= Fraction(m, bins)
        ]
        if inside:
            accuracy = Fraction(sum(right[i] for i in inside), len(inside))
            confidence = sum((Fraction(confidences[i]) for i in inside), Fraction(0)) / len(inside)
            total += Fraction(len(inside), len(confidences)) * abs(accuracy - confidence)
    return total


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 0.2, 0.5, 0.6, 0.8, 1.0])), st.booleans()),
        min_size=1,
        max_size=60,
    )
)
def test_ece_against_exact_fractions(cases: list[tuple[float, bool]]) -> None:
    confidences = np.array([c for c, _ in cases], dtype=np.float32)
    labels = np.array([0 if right else 1 for _, right in cases], dtype=np.int32)
    n = len(cases)
    predictions = Predictions(
        np.arange(n, dtype=np.uint64),
        labels,
        np.tile(np.array([0, 1], dtype=np.int32), (n, 1)),
        np.stack([confidences, 1 - confidences], axis=1),
        np.zeros(n, dtype=np.float32),
    )
    expected = exact_ece([float(c) for c in confidences], [right for _, right in cases], 15)
    calibration = compute_scores(predictions, 2).calibration
    assert calibration.ece == pytest.approx(float(expected), abs=1e-12)
    assert calibration.count.sum() == n


def test_perfect_and_hopeless_calibration() -> None:
    n = 1000
    half = np.full((n, 2), 0.5, dtype=np.float32)
    order = np.tile(np.array([0, 1], dtype=np.int32), (n, 1))
    keys, losses = np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.float32)
    fair = Predictions(keys, (np.arange(n) % 2).astype(np.int32), order, half, losses)
    assert compute_scores(fair, 2).calibration.ece == pytest.approx(0, abs=1e-12)
    sure = np.tile(np.array([1.0, 0.0], dtype=np.float32), (n, 1))
    wrong = Predictions(keys, np.ones(n, dtype=np.int32), order, sure, losses)
    assert compute_scores(wrong, 2).calibration.ece == pytest.approx(1, abs=1e-12)


def test_loss_is_averaged_in_float64() -> None:
    n = 100_001
    losses = np.full(n, 0.1, dtype=np.float32)
    losses[0] = 3e5
    one = np.zeros((n, 2), dtype=np.int32)
    one[:, 1] = 1
    p = Predictions(np.arange(n, dtype=np.uint64), np.zeros(n, np.int32), one, np.full((n, 2), 0.5, np.float32), losses)
    assert compute_scores(p, 2).loss == pytest.approx(math.fsum(float(x) for x in losses) / n, rel=1e-13)


def test_top5_stops_at_the_number_of_classes() -> None:
    _, _, predictions = random_case(50, 3, seed=1)
    scores = compute_scores(predictions, 3)
    assert (scores.top5, scores.top5_k) == (1.0, 3)


def test_worst_pairs_against_a_counter() -> None:
    logits, labels, predictions = random_case(3000, 100, seed=5)
    predicted = logits.argmax(axis=1)
    counts = Counter((int(t), int(p)) for t, p in zip(labels, predicted, strict=True) if t != p)
    expected = sorted(((t, p, c) for (t, p), c in counts.items()), key=lambda row: (-row[2], row[0], row[1]))
    assert compute_scores(predictions, 100).confusion.most_frequent(25) == expected[:25]


def test_a_class_without_samples_has_no_accuracy() -> None:
    _, labels, predictions = random_case(200, 4, seed=2)
    keep = np.flatnonzero(labels != 2)
    few = Predictions(**{name: getattr(predictions, name)[keep] for name in PREDICTION_COLUMNS})
    scores = compute_scores(few, 4)
    assert math.isnan(scores.per_class.accuracy[2])
    assert scores.per_class.support[2] == 0
    others = scores.per_class.accuracy[[0, 1, 3]]
    assert scores.balanced_accuracy == pytest.approx(others.mean(), rel=1e-12)


def test_most_confident_mistakes_come_first() -> None:
    logits, labels, predictions = random_case(400, 10, seed=7)
    rows = most_confident_mistakes(predictions, 20)
    wrong = [i for i in range(400) if logits[i].argmax() != labels[i]]
    expected = sorted(wrong, key=lambda i: (-float(predictions.confidences[i, 0]), i))[:20]
    assert rows.tolist() == expected


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (81, 263, 0.25527, 0.36624), (50, 100, 0.40383, 0.59617)],
)
def test_wilson_interval_published_values(right: int, n: int, low: float, high: float) -> None:
    """81 of 263 is the example of Newcombe 1998 (method 3: 0.2553 to 0.3662); others from Brown et al. 2001's form."""
    assert wilson_interval(right, n) == pytest.approx((low, high), abs=6e-5)


def test_a_diverged_model_is_scored_as_not_a_number() -> None:
    _, _, p = random_case(20, 5, seed=3)
    broken = Predictions(p.keys, p.labels, p.topk, np.full_like(p.confidences, np.nan), np.full_like(p.losses, np.nan))
    scores = compute_scores(broken, 5)
    assert math.isnan(scores.loss)
    assert math.isnan(scores.calibration.ece)
    assert 0 <= scores.top1 <= 1


def test_predictions_of_another_class_map_are_refused() -> None:
    _, _, predictions = random_case(50, 10, seed=4)
    with refused("9 classes", field="predictions.labels", got=9):
        compute_scores(predictions, 9)


def test_too_few_kept_classes_are_refused() -> None:
    logits, labels, _ = random_case(50, 10, seed=4)
    with refused(field="predictions.topk", got=3):
        compute_scores(from_logits(logits, labels, k=3), 10)


def test_no_predictions_are_refused() -> None:
    _, _, p = random_case(5, 10, seed=4)
    with refused(field="predictions"):
        compute_scores(Predictions(*(getattr(p, name)[:0] for name in PREDICTION_COLUMNS)), 10)


def test_the_temperature_has_the_least_loss() -> None:
    """Oracle: float64 cross-entropy of the full logits, minimised over a fine grid."""
    generator = np.random.default_rng(5)
    for scale in (0.4, 1.0, 3.0):
        logits = generator.normal(0, 2, (400, 7))
        uniform = generator.random(400)[:, None]
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        labels = (probabilities.cumsum(1) < uniform).sum(1)  # drawn from softmax(logits): the temperature is near scale

        def losses(factor: float, scaled: np.ndarray = logits * scale, labels: np.ndarray = labels) -> np.ndarray:
            z = scaled * factor
            return np.log(np.exp(z).sum(1)) - z[np.arange(400), labels]

        stored = np.stack([losses(factor) for factor in INVERSE_TEMPERATURES], axis=1).astype(np.float32)
        fine = np.exp(np.linspace(np.log(1 / 8), np.log(8), 1501))
        best = fine[np.argmin([losses(1 / temperature).mean() for temperature in fine])]
        assert fit_temperature(stored) == pytest.approx(best, rel=0.01)


@pytest.mark.parametrize("slope", [-1.0, 1.0, np.nan])
def test_without_a_least_loss_there_is_no_temperature(slope: float) -> None:
    stored = np.tile(slope * np.arange(len(INVERSE_TEMPERATURES), dtype=np.float32), (3, 1))
    assert fit_temperature(stored) is None
    assert fit_temperature(None) is None
