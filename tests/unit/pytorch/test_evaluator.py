"""Predictions of a batch, and the mode of a model during evaluation."""

import numpy as np
import torch

from podscale.pytorch.evaluator import batch_predictions, eval_mode, tempered_losses
from podscale.runs.predictions import INVERSE_TEMPERATURES


def test_predictions_are_ordered_and_equal_ones_by_class() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, -1.0, 3.0], [1.0] * 6])
    answers = batch_predictions(logits, torch.tensor([1, 5]))
    assert answers.topk.tolist() == [[5, 1, 2, 3, 0], [0, 1, 2, 3, 4]]
    probabilities = np.exp(logits.double().numpy())
    probabilities /= probabilities.sum(1, keepdims=True)
    np.testing.assert_allclose(answers.losses.numpy(), -np.log(probabilities[[0, 1], [1, 5]]), rtol=1e-5)
    np.testing.assert_allclose(answers.confidences[0].numpy(), probabilities[0, [5, 1, 2, 3, 0]], rtol=1e-5)


def test_fewer_than_five_classes_have_fewer_predictions() -> None:
    assert batch_predictions(torch.randn(2, 3), torch.tensor([0, 1])).topk.shape == (2, 3)


def test_losses_at_other_temperatures_are_cross_entropies() -> None:
    torch.manual_seed(0)
    logits, labels = 5 * torch.randn(4, 7), torch.tensor([0, 6, 3, 3])
    losses = tempered_losses(logits, labels)
    for column, factor in enumerate(INVERSE_TEMPERATURES):
        z = factor * logits.double().numpy()
        expected = np.log(np.exp(z).sum(1)) - z[np.arange(4), labels.numpy()]
        np.testing.assert_allclose(losses[:, column].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_evaluation_leaves_the_mode_as_it_was() -> None:
    model = torch.nn.Dropout()
    with eval_mode(model):
        assert not model.training
    assert model.training
    with eval_mode(model.eval()):
        pass
    assert not model.training
