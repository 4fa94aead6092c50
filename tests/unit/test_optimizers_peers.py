"""LARS and LAMB against the libraries that define their variants, where those are installed (optax, timm).

The same formulas stand as NumPy oracles in test_optimizers, so that a machine without the libraries checks them too.
"""

from typing import Any

import numpy as np
import pytest
import torch

from podscale.pytorch.optim import Lamb, Lars, Optimizer
from tests.support.flat_share import FlatArrays, hyper

STEPS, RATE, MOMENTUM, DECAY, ETA = 50, 0.1, 0.9, 1e-2, 0.02
SHAPES = {"conv": (8, 4, 3, 3), "gamma": (8,), "fc": (5, 8), "zero": (6, 6)}
DECAYS = {"conv": True, "gamma": False, "fc": True, "zero": True}
EVERYTHING = dict.fromkeys(SHAPES, True)

Values = dict[str, np.ndarray[Any, Any]]


def start() -> Values:
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=s).astype(np.float32) * (name != "zero") for name, s in SHAPES.items()}


def gradients(step: int) -> Values:
    generator = np.random.default_rng(1000 + step)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def ours(arrays: FlatArrays, optimizer: Optimizer, rate: float = RATE) -> Values:
    for step in range(STEPS):
        arrays.step(optimizer, gradients(step), hyper(rate, MOMENTUM, DECAY))
    return arrays.take(arrays.weights)


def of_torch(rule: Any, *, rate: float = RATE, **options: Any) -> Values:
    """What a torch optimizer makes of the same gradients; what does not decay is a group of its own."""
    weights = {name: torch.from_numpy(w).requires_grad_() for name, w in start().items()}
    groups = [{"params": [w], "weight_decay": DECAY * DECAYS[name]} for name, w in weights.items()]
    optimizer = rule(groups, lr=rate, **options)
    for step in range(STEPS):
        for name, g in gradients(step).items():
            weights[name].grad = torch.from_numpy(g)
        optimizer.step()
    return {name: w.detach().numpy() for name, w in weights.items()}


def compare(found: Values, want: Values) -> None:
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_of_optax(nesterov: bool) -> None:
    optax = pytest.importorskip("optax")
    rule = optax.lars(RATE, weight_decay=DECAY, trust_coefficient=ETA, eps=0.0, momentum=MOMENTUM, nesterov=nesterov)
    weights = start()
    state = rule.init(weights)
    for step in range(STEPS):
        updates, state = rule.update(gradients(step), state, weights)
        weights = optax.apply_updates(weights, updates)
    arrays = FlatArrays(start(), EVERYTHING)
    optimizer = Lars(arrays.share(), nesterov=nesterov, trust_coefficient=ETA, trust="norm_of_sum")
    compare(ours(arrays, optimizer), {name: np.asarray(w) for name, w in weights.items()})


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_lars_of_timm(nesterov: bool, clip: bool) -> None:
    rule = pytest.importorskip("timm.optim").Lars
    arrays = FlatArrays(start(), DECAYS)
    optimizer = Lars(arrays.share(), nesterov=nesterov, trust_coefficient=ETA, eps=1e-8, form="ratio_inside", clip=clip)
    options = {"momentum": MOMENTUM, "nesterov": nesterov, "trust_coeff": ETA, "eps": 1e-8, "trust_clip": clip}
    compare(ours(arrays, optimizer), of_torch(rule, **options))


@pytest.mark.parametrize("clip", [False, True])
def test_lamb_of_timm(clip: bool) -> None:
    rule = pytest.importorskip("timm.optim").Lamb
    arrays = FlatArrays(start(), DECAYS)
    optimizer = Lamb(arrays.share(), beta2=0.99, eps=1e-6, clip_norm=1.0, clip=clip)
    want = of_torch(rule, rate=0.01, betas=(MOMENTUM, 0.99), eps=1e-6, max_grad_norm=1.0, trust_clip=clip)
    compare(ours(arrays, optimizer, 0.01), want)
