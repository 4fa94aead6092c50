"""The update rules against independent NumPy oracles in float64, over many steps."""

from typing import Any

import numpy as np
import pytest
import torch

from podscale.config import ModelSection
from podscale.config.model import OptimizerSection
from podscale.models import spec
from podscale.pytorch.models import build_model
from podscale.pytorch.optim import Lars, Sgd, Slot, build_optimizer

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
    return [Slot(name, torch.from_numpy(weight), DECAYS[name]) for name, weight in start().items()]


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


def carry_out(optimizer: Sgd | Lars) -> dict[str, Any]:
    for step in range(STEPS):
        optimizer.step([torch.from_numpy(g) for g in gradients(step).values()], rate(step), FINITE)
    return {slot.name: slot.parameter.numpy() for slot in optimizer.slots}


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_sgd_follows_its_oracle(nesterov: bool, decay: float) -> None:
    found = carry_out(Sgd(slots(), momentum=0.9, nesterov=nesterov, weight_decay=decay))
    for name, want in sgd_oracle(0.9, nesterov, decay).items():
        np.testing.assert_allclose(found[name], want, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("decay", "eps"), [(0.0, 0.0), (1e-2, 1e-5)])
def test_lars_follows_its_oracle(nesterov: bool, decay: float, eps: float) -> None:
    optimizer = Lars(slots(), momentum=0.9, nesterov=nesterov, weight_decay=decay, trust_coefficient=0.02, eps=eps)
    found = carry_out(optimizer)
    for name, want in lars_oracle(0.9, nesterov, decay, 0.02, eps).items():
        np.testing.assert_allclose(found[name], want, rtol=2e-5, atol=2e-5, err_msg=name)


def test_sgd_is_torchs_own() -> None:
    ours = slots()
    theirs = [slot.parameter.clone().requires_grad_() for slot in ours]
    groups = [
        {"params": [w], "weight_decay": 1e-2 if slot.decays else 0.0} for w, slot in zip(theirs, ours, strict=True)
    ]
    reference = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    optimizer = Sgd(ours, momentum=0.9, nesterov=True, weight_decay=1e-2)
    for step in range(10):
        for w, g in zip(theirs, gradients(step).values(), strict=True):
            w.grad = torch.from_numpy(g)
        reference.step()
        optimizer.step([torch.from_numpy(g) for g in gradients(step).values()], 0.1, FINITE)
    for slot, w in zip(ours, theirs, strict=True):
        torch.testing.assert_close(slot.parameter, w.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "lars"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_masked_update_changes_nothing_to_the_bit(name: str, nesterov: bool) -> None:
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 1e-2}
    optimizer = Sgd(slots(), **options) if name == "sgd" else Lars(slots(), trust_coefficient=0.02, eps=0.0, **options)
    optimizer.step([torch.from_numpy(g) for g in gradients(0).values()], 0.1, FINITE)
    before = [(slot.parameter.clone(), slot.momentum.clone()) for slot in optimizer.slots]
    optimizer.step([torch.zeros(shape) for shape in SHAPES.values()], 0.1, NOT_FINITE)
    for slot, (parameter, momentum) in zip(optimizer.slots, before, strict=True):
        assert torch.equal(slot.parameter, parameter)
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
    assert Slot("conv", filters, True).momentum.is_contiguous(memory_format=torch.channels_last)
