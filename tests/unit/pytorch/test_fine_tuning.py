"""Factors of the learning rate: each optimizer's weights are those of a run with another learning rate."""

from typing import Any

import numpy as np
import pytest
import torch

from podscale.config.optimizer import OptimizerSection
from podscale.pytorch.fine_tuning import RateScales
from podscale.pytorch.optim import Optimizer, build_optimizer
from tests.support.flat_share import FlatArrays, hyper
from tests.support.optimizer_oracles import DECAYS, SHAPES, STEPS, gradients, momentum, momentum_oracle, rate, start

FACTORS = {"conv": 0.25, "gamma": 3.0, "fc": 0.0, "zero": 0.25, "large": 1.0}
SECTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "nesterov": True},
    "sgd unscaled": {"name": "sgd", "momentum_form": "unscaled"},
    "lars": {"name": "lars", "trust_coefficient": 0.02},
    "lamb": {"name": "lamb"},
    "adam": {"name": "adam"},
    "adam decoupled": {"name": "adam", "adam": {"decoupled": True}},
    "rmsprop": {"name": "rmsprop"},
    "muon": {"name": "muon"},
    "shampoo": {"name": "shampoo", "shampoo": {"block": 16, "vectors": False, "every_steps": 10}},
    "shampoo adagrad": {
        "name": "shampoo",
        "shampoo": {"block": 16, "every_steps": 25, "graft": "adagrad", "start_step": 25},
    },
}


def build(arrays: FlatArrays, name: str) -> Optimizer:
    return build_optimizer(OptimizerSection.model_validate(SECTIONS[name]), arrays.share(), 10.0)


def train_scaled(arrays: FlatArrays, optimizer: Optimizer, decay: float) -> dict[str, np.ndarray[Any, Any]]:
    flat = torch.ones_like(arrays.weights)
    arrays.put(flat, {name: np.full(shape, FACTORS[name], np.float32) for name, shape in SHAPES.items()})
    scales = RateScales([arrays.weights], flat)
    for step in range(STEPS):
        scales.save()
        arrays.step(optimizer, gradients(step), hyper(rate(step), momentum(step), decay), number=step)
        scales.apply()
    return arrays.take(arrays.weights)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_factor_is_another_learning_rate(name: str) -> None:
    arrays = FlatArrays(start(), DECAYS)
    found = train_scaled(arrays, build(arrays, name), 1e-2)
    for factor in set(FACTORS.values()):
        others = FlatArrays(start(), DECAYS)
        expected = others.train(build(others, name), 1e-2, times=factor)
        for key in (key for key, value in FACTORS.items() if value == factor):
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-4, atol=1e-5, err_msg=key)
    assert np.array_equal(found["fc"], start()["fc"])


def test_momentum_with_factors_follows_its_float64_oracle() -> None:
    """Each array's recursion is that of Polyak's momentum with the factor on the learning rate."""
    arrays = FlatArrays(start(), DECAYS)
    found = train_scaled(arrays, build(arrays, "sgd unscaled"), 1e-2)
    adapted = dict.fromkeys(SHAPES, True)
    # The oracle's ratio multiplies the learning rate of one array, so it is the factor.
    factors = {start()[key].shape: value for key, value in FACTORS.items()}
    oracle = momentum_oracle(lambda w, g, d, r: factors[w.shape], "unscaled", False, 1e-2, DECAYS, adapted)
    for key, value in oracle.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=2e-5, err_msg=key)


def test_a_masked_step_changes_nothing_to_the_bit() -> None:
    arrays = FlatArrays(start(), DECAYS)
    optimizer = build(arrays, "sgd")
    before = arrays.weights.clone()
    scales = RateScales([arrays.weights], torch.full_like(before, 0.3))
    scales.save()
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    assert not arrays.step(optimizer, zeros, hyper(0.1), finite=False)
    scales.apply()
    assert torch.equal(arrays.weights, before)
