"""The update rules against independent NumPy oracles in float64, over many steps."""

from typing import Any

import numpy as np
import pytest
import torch

from podscale.config import ModelSection
from podscale.config.model import OptimizerSection
from podscale.models import spec
from podscale.pytorch.models import build_model
from podscale.pytorch.optim import Hyper, Lars, Optimizer, Sgd, Slot, build_optimizer

SHAPES = {"conv": (8, 4, 3, 3), "gamma": (8,), "fc": (5, 8), "zero": (6, 6)}
DECAYS = {"conv": True, "gamma": False, "fc": True, "zero": True}
FINITE, NOT_FINITE = torch.tensor(True), torch.tensor(False)
STEPS = 50


def start() -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    weights = {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    weights["zero"][:] = 0
    return weights


def gradients(step: int) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(1000 + step)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def rate(step: int) -> float:
    return 0.1 + 0.05 * np.sin(step)


def slots() -> list[Slot]:
    return [
        Slot(name, torch.from_numpy(weight), decays=DECAYS[name], adapts=DECAYS[name])
        for name, weight in start().items()
    ]


def hyper(rate: float, momentum: float = 0.9, decay: float = 1e-2) -> Hyper:
    return Hyper(*(torch.tensor(value, dtype=torch.float32) for value in (rate, momentum, decay)))


def give(optimizer: Optimizer, gradients: dict[str, Any]) -> None:
    for slot in optimizer.slots:
        slot.weight.grad = torch.from_numpy(gradients[slot.name])


def sgd_oracle(momentum: float, nesterov: bool, decay: float) -> dict[str, np.ndarray[Any, Any]]:
    weights = {name: w.astype(np.float64) for name, w in start().items()}
    velocity = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in range(STEPS):
        for name, g in gradients(step).items():
            d = g + (decay * weights[name] if DECAYS[name] else 0.0)
            velocity[name] = momentum * velocity[name] + d
            weights[name] -= rate(step) * (d + momentum * velocity[name] if nesterov else velocity[name])
    return weights


def lars_oracle(momentum: float, nesterov: bool, decay: float, eta: float, eps: float) -> dict[str, Any]:
    weights = {name: w.astype(np.float64) for name, w in start().items()}
    velocity = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in range(STEPS):
        for name, g in gradients(step).items():
            w = weights[name]
            ratio, d = 1.0, g.astype(np.float64)
            if DECAYS[name]:
                w_norm, g_norm = np.sqrt((w * w).sum()), np.sqrt((d * d).sum())
                if w_norm > 0 and g_norm > 0:
                    ratio = eta * w_norm / (g_norm + decay * w_norm + eps)
                d = d + decay * w
            scaled = rate(step) * ratio * d
            velocity[name] = momentum * velocity[name] + scaled
            weights[name] = w - (momentum * velocity[name] + scaled if nesterov else velocity[name])
    return weights


def carry_out(optimizer: Optimizer, decay: float) -> dict[str, Any]:
    for step in range(STEPS):
        give(optimizer, gradients(step))
        assert optimizer.step(hyper(rate(step), decay=decay), FINITE)
    return {slot.name: slot.weight.numpy() for slot in optimizer.slots}


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_sgd_follows_its_oracle(nesterov: bool, decay: float) -> None:
    found = carry_out(Sgd(slots(), nesterov=nesterov), decay)
    for name, want in sgd_oracle(0.9, nesterov, decay).items():
        np.testing.assert_allclose(found[name], want, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("decay", "eps"), [(0.0, 0.0), (1e-2, 1e-5)])
def test_lars_follows_its_oracle(nesterov: bool, decay: float, eps: float) -> None:
    found = carry_out(Lars(slots(), nesterov=nesterov, trust_coefficient=0.02, eps=eps), decay)
    for name, want in lars_oracle(0.9, nesterov, decay, 0.02, eps).items():
        np.testing.assert_allclose(found[name], want, rtol=2e-5, atol=2e-5, err_msg=name)


def test_sgd_is_torchs_own() -> None:
    ours = slots()
    theirs = [slot.weight.clone().requires_grad_() for slot in ours]
    groups = [
        {"params": [w], "weight_decay": 1e-2 if slot.decays else 0.0} for w, slot in zip(theirs, ours, strict=True)
    ]
    reference = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    optimizer = Sgd(ours, nesterov=True)
    for step in range(10):
        for w, g in zip(theirs, gradients(step).values(), strict=True):
            w.grad = torch.from_numpy(g)
        reference.step()
        give(optimizer, gradients(step))
        optimizer.step(hyper(0.1), FINITE)
    for slot, w in zip(ours, theirs, strict=True):
        torch.testing.assert_close(slot.weight, w.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "lars"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_masked_update_changes_nothing_to_the_bit(name: str, nesterov: bool) -> None:
    optimizer: Optimizer = (
        Sgd(slots(), nesterov=nesterov)
        if name == "sgd"
        else Lars(slots(), nesterov=nesterov, trust_coefficient=0.02, eps=0.0)
    )
    give(optimizer, gradients(0))
    assert optimizer.step(hyper(0.1), FINITE)
    before = [(slot.weight.clone(), slot.momentum.clone()) for slot in optimizer.slots]
    give(optimizer, {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    assert not optimizer.step(hyper(0.1), NOT_FINITE)
    for slot, (weight, momentum) in zip(optimizer.slots, before, strict=True):
        assert torch.equal(slot.weight, weight)
        assert torch.equal(slot.momentum, momentum)
        assert momentum.any()


def test_batch_norm_and_biases_neither_decay_nor_scale() -> None:
    section = ModelSection(name="resnet18", width=8, stem="small")
    model, catalogue = build_model(section, 10), spec(section, 10)
    optimizer = build_optimizer(OptimizerSection(name="lars"), model, catalogue)
    still = [slot.name for slot in optimizer.slots if not slot.decays]
    assert set(still) == {p.name for p in catalogue.parameters if p.role != "weight"}
    assert [slot.name for slot in optimizer.slots] == [name for name, _ in model.named_parameters()]
    everything = build_optimizer(OptimizerSection(name="lars", decay_all=True), model, catalogue)
    assert all(slot.decays for slot in everything.slots)


def test_momentum_lies_as_its_parameter() -> None:
    filters = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    assert Slot("conv", filters, decays=True, adapts=True).momentum.is_contiguous(memory_format=torch.channels_last)
