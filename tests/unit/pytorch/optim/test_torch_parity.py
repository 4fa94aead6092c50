"""Optimizers equal the libraries that define their variants (torch, optax, timm), at a changing learning rate."""

from typing import Any

import numpy as np
import pytest
import torch

from podscale.pytorch.optim import Adam, Lamb, Lars, RmsProp, Sgd
from tests.support.flat_share import FlatArrays, hyper
from tests.support.optimizer_oracles import DECAYS, EVERYTHING, STEPS, Values, compare, gradients, momentum, rate, start

DECAY, ETA, BETA = 1e-2, 0.02, 0.9


def of_torch(rule: Any, *, times: float = 1.0, **options: Any) -> Values:
    """Return the weights of a torch optimizer after the same gradients; each array is a group, which decays or not."""
    weights = {name: torch.from_numpy(w).requires_grad_() for name, w in start().items()}
    groups = [{"params": [w], "weight_decay": DECAY * DECAYS[name]} for name, w in weights.items()]
    optimizer = rule(groups, lr=0.1, **options)
    for step in range(1, STEPS):
        for group in optimizer.param_groups:
            group["lr"] = times * rate(step)
            if "momentum" in group:
                group["momentum"] = momentum(step)
        for name, g in gradients(step).items():
            weights[name].grad = torch.from_numpy(g)
        optimizer.step()
    return {name: w.detach().numpy() for name, w in weights.items()}


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_of_torch(nesterov: bool) -> None:
    arrays = FlatArrays(start(), DECAYS)
    want = of_torch(torch.optim.SGD, momentum=BETA, nesterov=nesterov)
    compare(arrays.train(Sgd(arrays.share(), nesterov=nesterov), DECAY, first=1), want)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_of_optax(nesterov: bool) -> None:
    optax = pytest.importorskip("optax")
    rule = optax.lars(
        lambda count: 0.1 * (1 + count % 5),
        weight_decay=DECAY,
        trust_coefficient=ETA,
        eps=0.0,
        momentum=BETA,
        nesterov=nesterov,
    )
    weights: Any = start()
    state = rule.init(weights)
    arrays = FlatArrays(start(), EVERYTHING)
    optimizer = Lars(arrays.share(), nesterov=nesterov, trust_coefficient=ETA, trust="norm_of_sum")
    for step in range(STEPS):
        updates, state = rule.update(gradients(step), state, weights)
        weights = optax.apply_updates(weights, updates)
        arrays.step(optimizer, gradients(step), hyper(0.1 * (1 + step % 5), BETA, DECAY))
    compare(arrays.take(arrays.weights), {name: np.asarray(w) for name, w in weights.items()})


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_lars_of_timm(nesterov: bool, clip: bool) -> None:
    rule = pytest.importorskip("timm.optim").Lars
    arrays = FlatArrays(start(), DECAYS)
    optimizer = Lars(arrays.share(), nesterov=nesterov, trust_coefficient=ETA, eps=1e-8, form="ratio_inside", clip=clip)
    options = {"momentum": BETA, "nesterov": nesterov, "trust_coeff": ETA, "eps": 1e-8, "trust_clip": clip}
    compare(arrays.train(optimizer, DECAY, first=1), of_torch(rule, **options))


@pytest.mark.parametrize("clip", [False, True])
def test_lamb_of_timm(clip: bool) -> None:
    rule = pytest.importorskip("timm.optim").Lamb
    arrays = FlatArrays(start(), DECAYS)
    optimizer = Lamb(arrays.share(), beta2=0.99, eps=1e-6, clip_norm=1.0, clip=clip)
    want = of_torch(rule, times=0.1, betas=(BETA, 0.99), eps=1e-6, max_grad_norm=1.0, trust_clip=clip)
    compare(arrays.train(optimizer, DECAY, first=1, times=0.1, beta=BETA), want)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_of_torch(decoupled: bool) -> None:
    arrays = FlatArrays(start(), DECAYS)
    optimizer = Adam(arrays.share(), beta2=0.99, eps=1e-6, decoupled=decoupled)
    rule = torch.optim.AdamW if decoupled else torch.optim.Adam
    want = of_torch(rule, times=0.1, betas=(BETA, 0.99), eps=1e-6)
    compare(arrays.train(optimizer, DECAY, first=1, times=0.1, beta=BETA), want)
    assert optimizer.scalars["updates"] == STEPS - 1


def test_rmsprop_of_torch() -> None:
    arrays = FlatArrays(start(), DECAYS)
    want = of_torch(torch.optim.RMSprop, times=0.1, momentum=BETA, alpha=0.95, eps=1e-6)
    compare(arrays.train(RmsProp(arrays.share(), decay=0.95, eps=1e-6), DECAY, first=1, times=0.1), want)


@pytest.mark.parametrize("form", ["scaled", "unscaled"])
def test_rmsprop_of_tensorflow(form: Any) -> None:
    """As in timm, with the epsilon of Inception's training."""
    rule = pytest.importorskip("timm.optim").RMSpropTF
    arrays = FlatArrays(start(), DECAYS)
    want = of_torch(rule, momentum=BETA, alpha=0.95, eps=1.0, lr_in_momentum=form == "unscaled")
    optimizer = RmsProp(arrays.share(), decay=0.95, eps=1.0, variant="tensorflow", form=form)
    compare(arrays.train(optimizer, DECAY, first=1), want)
