"""Muon follows a float64 NumPy oracle over 50 steps, and torch's own.

tests/distributed/pytorch/optim/test_sharded_update.py tests the matrices shared over ranks on real processes.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from podscale.config.optimizer import MuonSection
from podscale.pytorch.optim import Muon
from podscale.pytorch.optim.base import ReplicaGroup
from podscale.pytorch.optim.muon import newton_schulz
from tests.support import optimizer_oracles
from tests.support.flat_share import FlatArrays, hyper
from tests.support.muon_oracle import muon_oracle
from tests.support.optimizer_oracles import draw_steps, rate

SHAPES = {
    "gamma": (20,),
    "wide": (12, 5, 3, 3),
    "same": (12, 5, 3, 3),
    "high": (17, 4),
    "zero": (6, 6),
    "other": (7, 9),
}
MATRICES = {"wide", "same", "high", "zero"}
DECAYS = {name: name != "gamma" for name in SHAPES}
ADAPTS = {name: name != "other" for name in SHAPES}  # "gamma" is no matrix
DECAY = 1e-2
draw = partial(optimizer_oracles.draw, SHAPES)
steps = partial(draw_steps, SHAPES, DECAY, masked=(4, 9))


def build(*, nesterov: bool = False, **options: Any) -> tuple[FlatArrays, Muon]:
    arrays = FlatArrays(draw(0), DECAYS, ADAPTS)
    return arrays, Muon(arrays.share(), MuonSection(**options), ReplicaGroup(), nesterov=nesterov)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": "rms", "other_rate": 0.3}, {"iterations": 3}],
    ids=["defaults", "rms", "three iterations"],
)
def test_muon_follows_its_oracle(options: dict[str, Any], nesterov: bool) -> None:
    arrays, rule = build(nesterov=nesterov, **options)
    for step in steps():
        arrays.run(rule, step)
    want = muon_oracle(draw(0), steps(), DECAYS, MATRICES, nesterov=nesterov, **options)
    found = arrays.take(arrays.weights)
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=5e-5, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("scale", ["aspect", "rms"])
@pytest.mark.parametrize("shape", [(24, 60), (60, 24)])
def test_muon_of_torch(shape: tuple[int, int], scale: str) -> None:
    """torch iterates in bf16, which has two to three digits."""
    theirs = getattr(torch.optim, "Muon", None)
    if theirs is None:
        pytest.skip("this torch has no Muon")
    generator = np.random.default_rng(0)
    start = generator.normal(size=shape).astype(np.float32)
    arrays = FlatArrays({"w": start}, {"w": True})
    rule = Muon(arrays.share(), MuonSection(scale=scale, precision="bf16"), ReplicaGroup(), nesterov=True)
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    adjust = {"aspect": "original", "rms": "match_rms_adamw"}[scale]
    optimizer = theirs([weight], lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=True, adjust_lr_fn=adjust)
    for _ in range(10):
        given = generator.normal(size=shape).astype(np.float32)
        arrays.step(rule, {"w": given}, hyper(0.02, 0.9, 0.1))
        weight.grad = torch.from_numpy(given.copy())
        optimizer.step()
    moved = weight.detach().numpy() - start
    difference = arrays.take(arrays.weights)["w"] - weight.detach().numpy()
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
        arrays.run(rule, step)
    before = arrays.weights.clone(), rule.moments["momentum"].clone()
    arrays.run(rule, steps()[4])
    assert torch.equal(arrays.weights, before[0])
    assert torch.equal(rule.moments["momentum"], before[1])


def test_without_matrices_it_is_sgd() -> None:
    ones = {"in": np.ones((4, 3), np.float32), "out": np.ones((2, 4), np.float32)}
    arrays = FlatArrays(ones, dict.fromkeys(ones, True), dict.fromkeys(ones, False))
    rule = Muon(arrays.share(), MuonSection(), ReplicaGroup(), nesterov=False)
    arrays.step(rule, ones, hyper(0.5, 0.9, 0.0))
    assert all((array == 0.5).all() for array in arrays.take(arrays.weights).values())


def test_a_rank_may_have_no_matrix() -> None:
    arrays = FlatArrays(draw(0), DECAYS, ADAPTS)
    silent = ReplicaGroup(39, 40, lambda local: local.new_zeros(40 * len(local)))
    rule = Muon(arrays.share(), MuonSection(), silent, nesterov=False)
    arrays.run(rule, steps()[1])
    found = arrays.take(arrays.weights)
    for name in MATRICES:  # nobody else sends anything, so they only decay
        np.testing.assert_allclose(found[name], (1 - rate(1) * DECAY) * draw(0)[name], rtol=1e-6, err_msg=name)
