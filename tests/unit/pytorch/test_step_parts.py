"""Small parts of a step and of an evaluation."""

import numpy as np
import pytest
import torch

from podscale.pytorch.collective_errors import classify_error
from podscale.pytorch.evaluator import batch_predictions, eval_mode
from podscale.pytorch.train_step import all_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("length", [1, 7, 64, 1000, 100_003])
def test_one_bad_element_anywhere_is_found(bad: float, length: int) -> None:
    generator = np.random.default_rng(length)
    for place in {0, length - 1, *generator.integers(0, length, 10).tolist()}:
        values = torch.randn(length)
        assert all_finite([values, torch.zeros(3)])
        values[place] = bad
        assert not all_finite([torch.zeros(3), values])


def test_large_but_finite_values_are_finite() -> None:
    assert all_finite([torch.full((1000,), 3e38)])


def test_answers_are_ordered_and_ties_go_to_the_lower_class() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, -1.0, 3.0], [1.0] * 6])
    answers = batch_predictions(logits, torch.tensor([1, 5]))
    assert answers.topk.tolist() == [[5, 1, 2, 3, 0], [0, 1, 2, 3, 4]]
    probabilities = np.exp(logits.double().numpy())
    probabilities /= probabilities.sum(1, keepdims=True)
    np.testing.assert_allclose(answers.losses.numpy(), -np.log(probabilities[[0, 1], [1, 5]]), rtol=1e-5)
    np.testing.assert_allclose(answers.confidences[0].numpy(), probabilities[0, [5, 1, 2, 3, 0]], rtol=1e-5)


def test_few_classes_have_few_answers() -> None:
    assert batch_predictions(torch.randn(2, 3), torch.tensor([0, 1])).topk.shape == (2, 3)


def test_evaluation_leaves_the_mode_as_it_was() -> None:
    model = torch.nn.Dropout()
    with eval_mode(model):
        assert not model.training
    assert model.training
    with eval_mode(model.eval()):
        pass
    assert not model.training


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711", 77),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation to complete", 76),
        ("shape mismatch", None),
    ],
)
def test_failed_collectives_are_told_from_other_errors(text: str, code: int | None) -> None:
    kind = classify_error(RuntimeError(text))
    assert (int(kind.exit_code) if kind else None) == code


def test_other_errors_are_no_lost_peers() -> None:
    assert classify_error(ValueError("gloo connection closed by peer")) is None
