"""Muon follows a float64 NumPy oracle over 50 steps, and torch's own.

tests/distributed/pytorch/optim/test_sharded_update.py tests the matrices shared over ranks on real processes.
"""

from typing import Any

import numpy as np
import pytest
import torch

from podscale.config.optimizer import MuonSection
from podscale.pytorch.optim import Muon
from podscale.pytorch.optim.base import ReplicaGroup
from podscale.pytorch.optim.muon import newton_schulz
from podscale.training.muon import orthogonalised_parameters
from tests.support.flat_share import FlatArrays, hyper
from tests.support.muon_oracle import muon_oracle
from tests.support.shampoo_oracle import Step
from tests.support.updates import Values, momentum, rate

SHAPES = {
    "stem": (8, 3, 3, 3),
    "gamma": (20,),
    "wide": (12, 5, 3, 3),
    "same": (12, 5, 3, 3),
    "high": (17, 4),
    "zero": (6, 6),
    "skipped": (7, 9),
    "head": (10, 17),
}
INNER = {"wide", "same", "high", "zero"}
DECAYS = {name: name != "gamma" for name in SHAPES}
ADAPTS = {name: name not in ("gamma", "skipped") for name in SHAPES}
STEPS, DECAY, MASKED = 50, 1e-2, (4, 9)


def draw(seed: int) -> Values:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def steps() -> list[Step]:
    found = [Step(draw(1000 + n), rate(n), momentum(n), DECAY, n not in MASKED) for n in range(STEPS)]
    for step in found:
        step.gradients["zero"][:] = 0
    return found


def build(*, nesterov: bool = False, **options: Any) -> tuple[FlatArrays, Muon]:
    arrays = FlatArrays(draw(0), DECAYS, ADAPTS)
    return arrays, Muon(arrays.share(), MuonSection(**options), ReplicaGroup(), nesterov=nesterov)


def run_step(arrays: FlatArrays, rule: Muon, step: Step) -> None:
    given = step.gradients if step.finite else {name: 0 * g for name, g in step.gradients.items()}
    row = hyper(step.rate, step.momentum, step.decay)
    assert arrays.step(rule, given, row, finite=step.finite) == step.finite


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": "rms", "other_rate": 0.3}, {"ends": True, "iterations": 3}],
    ids=["defaults", "rms", "ends"],
)
def test_muon_follows_its_oracle(options: dict[str, Any], nesterov: bool) -> None:
    arrays, rule = build(nesterov=nesterov, **options)
    for step in steps():
        run_step(arrays, rule, step)
    known = {name: value for name, value in options.items() if name != "ends"}
    matrices = INNER | {"stem", "head"} if options.get("ends") else INNER
    want = muon_oracle(draw(0), steps(), DECAYS, matrices, nesterov=nesterov, **known)
    found = arrays.take(arrays.weights)
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=5e-5, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("scale", ["aspect", "rms"])
@pytest.mark.parametrize("shape", [(24, 60), (60, 24)])
def test_muon_of_torch(shape: tuple[int, int], scale: str) -> None:
    """torch iterates in bf16, which has two to three digits."""
    theirs = pytest.importorskip("torch.optim").Muon
    generator = np.random.default_rng(0)
    start = {name: generator.normal(size=shape).astype(np.float32) for name in ("first", "middle", "last")}
    arrays = FlatArrays(start, dict.fromkeys(start, True))
    rule = Muon(arrays.share(), MuonSection(scale=scale, precision="bf16"), ReplicaGroup(), nesterov=True)
    weight = torch.nn.Parameter(torch.from_numpy(start["middle"].copy()))
    adjust = {"aspect": "original", "rms": "match_rms_adamw"}[scale]
    optimizer = theirs([weight], lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=True, adjust_lr_fn=adjust)
    for _ in range(10):
        given = {name: generator.normal(size=shape).astype(np.float32) for name in start}
        arrays.step(rule, given, hyper(0.02, 0.9, 0.1))
        weight.grad = torch.from_numpy(given["middle"].copy())
        optimizer.step()
    moved = weight.detach().numpy() - start["middle"]
    difference = arrays.take(arrays.weights)["middle"] - weight.detach().numpy()
    assert np.linalg.norm(difference) < 0.03 * np.linalg.norm(moved)


@pytest.mark.parametrize("shape", [(3, 8, 30), (3, 30, 8)])
def test_singular_values_become_about_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(newton_schulz(matrices, MuonSection()))
    assert (values > 0.67).all()
    assert (values < 1.15).all()


def test_a_masked_step_changes_nothing() -> None:
    arrays, rule = build(nesterov=True)
    for step in steps()[:4]:
        run_step(arrays, rule, step)
    before = arrays.weights.clone(), rule.moments["momentum"].clone()
    run_step(arrays, rule, steps()[4])
    assert torch.equal(arrays.weights, before[0])
    assert torch.equal(rule.moments["momentum"], before[1])


def test_a_model_of_two_matrices_has_none_to_orthogonalise() -> None:
    arrays = FlatArrays({"in": np.ones((4, 3), np.float32), "out": np.ones((2, 4), np.float32)}, {"in": 1, "out": 1})
    rule = Muon(arrays.share(), MuonSection(), ReplicaGroup(), nesterov=False)
    arrays.step(rule, {"in": np.ones((4, 3), np.float32), "out": np.ones((2, 4), np.float32)}, hyper(0.5, 0.9, 0.0))
    assert all((array == 0.5).all() for array in arrays.take(arrays.weights).values())


def test_the_matrices_between_the_first_and_the_last_are_chosen() -> None:
    shapes = [(8, 3, 3, 3), (8,), (8, 8), (9, 8), (9,), (5, 9)]
    scaled = [True, False, True, False, False, True]
    assert orthogonalised_parameters(shapes, scaled, ends=False) == [2]
    assert orthogonalised_parameters(shapes, scaled, ends=True) == [0, 2, 5]


def test_a_rank_may_have_no_matrix() -> None:
    arrays = FlatArrays(draw(0), DECAYS, ADAPTS)
    silent = ReplicaGroup(39, 40, lambda local: local.new_zeros(40 * len(local)))
    rule = Muon(arrays.share(), MuonSection(), silent, nesterov=False)
    run_step(arrays, rule, steps()[1])
    found = arrays.take(arrays.weights)
    for name in INNER:  # nobody else sends anything, so they only decay
        np.testing.assert_allclose(found[name], (1 - rate(1) * DECAY) * draw(0)[name], rtol=1e-6, err_msg=name)
