"""Shampoo's parts follow their definitions, and the whole optimizer a float64 NumPy oracle over 50 steps.

tests/distributed/pytorch/optim/test_sharded_update.py tests the distribution over ranks on real processes.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from podscale.config.optimizer import ShampooSection
from podscale.pytorch.optim import ParamSlice
from podscale.pytorch.optim.base import ReplicaGroup
from podscale.pytorch.optim.shampoo import Shampoo
from podscale.pytorch.optim.shampoo_factors import (
    RootMethod,
    inverse_root,
    stack_blocks,
)
from podscale.training.shampoo import merge_small_dims, preconditioner_elements
from tests.support import optimizer_oracles
from tests.support.flat_share import FlatArrays, hyper
from tests.support.optimizer_oracles import STEPS, draw_steps
from tests.support.shampoo_oracle import shampoo_oracle

SHAPES = {"conv": (12, 5, 3, 3), "gamma": (20,), "fc": (10, 17), "zero": (6, 6), "one": (1, 1)}
DECAYS = {name: name != "gamma" for name in SHAPES}
draw = partial(optimizer_oracles.draw, SHAPES)
steps = partial(draw_steps, SHAPES, 1e-2, masked=(4, 9))
"""The gradient of `zero` is a norm of zero, of the graft and of the direction."""


def run_steps(arrays: FlatArrays, rule: Shampoo, first: int = 0, last: int = STEPS) -> None:
    for number, step in enumerate(steps()[first:last], first):
        arrays.run(rule, step, number)


def build(*, nesterov: bool = True, **options: Any) -> tuple[FlatArrays, Shampoo]:
    arrays = FlatArrays(draw(0), DECAYS)
    return arrays, Shampoo(arrays.share(), ShampooSection(**options), ReplicaGroup(), nesterov=nesterov)


@pytest.mark.parametrize(
    ("options", "roots"),
    [
        ({"block": 8, "start_step": 3, "every_steps": 1}, "eigh"),
        ({"block": 128, "start_step": 5, "every_steps": 3, "exponent": 4, "beta2": 0.75, "eps": 1e-2}, "eigh"),
        ({"block": 128, "start_step": 5, "every_steps": 3, "exponent": 4, "beta2": 0.75, "eps": 1e-2}, "newton"),
        (
            {
                "block": 8,
                "every_steps": 4,
                "graft": "adagrad",
                "beta2": 1.0,
                "eps": 0.1,
                "vectors": False,
                "nesterov": False,
            },
            "eigh",
        ),
        ({"block": 5, "start_step": 2, "every_steps": 9, "graft": "rmsprop", "beta2": 0.9, "exponent": 3}, "newton"),
    ],
)
def test_shampoo_follows_its_oracle(options: dict[str, Any], roots: RootMethod) -> None:
    options = {"eps": 1e-3, "beta2": 0.95, "start_step": 0} | options
    arrays, rule = build(**options, roots=roots)
    run_steps(arrays, rule)
    found, want = arrays.take(arrays.weights), shampoo_oracle(draw(0), steps(), DECAYS, **options)
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-5, err_msg=name)


def test_a_masked_step_does_not_change_the_state() -> None:
    arrays, rule = build(block=8, start_step=1, every_steps=2, graft="rmsprop")
    run_steps(arrays, rule, last=4)  # steps 4 and 9 are masked; step 9 would compute roots
    for number in (4, 9):
        before = [
            arrays.weights.clone(),
            *(m.clone() for m in rule.moments.values()),
            *rule.extra_state_arrays().values(),
        ]
        run_steps(arrays, rule, number, number + 1)
        for old, new in zip(
            before, [arrays.weights, *rule.moments.values(), *rule.extra_state_arrays().values()], strict=True
        ):
            assert torch.equal(old, new)
        run_steps(arrays, rule, number + 1, 9)


def test_a_resumed_optimizer_continues_to_the_bit() -> None:
    """Resumed between two updates of the roots, which are part of the state."""
    options: dict[str, Any] = {"block": 8, "start_step": 2, "every_steps": 7, "graft": "adagrad"}
    whole, rule = build(**options)
    run_steps(whole, rule, last=20)
    resumed, again = build(**options)
    resumed.weights.copy_(whole.weights)
    for name, values in again.moments.items():
        values.copy_(rule.moments[name])
    again.load_extra_state({name: values.clone() for name, values in rule.extra_state_arrays().items()})
    for arrays, each in ((whole, rule), (resumed, again)):
        run_steps(arrays, each, first=20)
    assert torch.equal(whole.weights, resumed.weights)
    assert again.extra_state_arrays().keys() == {
        f"{kind}/{name}" for kind in ("statistics", "roots") for name in SHAPES
    }


def test_a_square_that_overflows_does_not_change_its_matrix() -> None:
    arrays, rule = build(block=8)
    run_steps(arrays, rule, last=4)
    before = rule.extra_state_arrays()
    given = draw(3) | {"fc": np.full(SHAPES["fc"], 1e25, np.float32)}
    assert arrays.step(rule, given, hyper(0.0), number=4)
    after = rule.extra_state_arrays()
    for name in SHAPES:
        assert torch.equal(before[f"statistics/{name}"], after[f"statistics/{name}"]) == (name == "fc")
        assert after[f"roots/{name}"].isfinite().all()


@pytest.mark.parametrize("method", ["eigh", "newton"])
@pytest.mark.parametrize("power", [1, 2, 3, 4, 6, 8])
def test_an_inverse_root_to_its_power_is_the_inverse(method: RootMethod, power: int) -> None:
    generator = torch.Generator().manual_seed(0)
    thin = torch.randn(5, 24, 12, generator=generator, dtype=torch.float64)
    full = torch.randn(5, 24, 40, generator=generator, dtype=torch.float64)
    matrices = torch.cat([thin @ thin.mT, 1e-3 * full @ full.mT, torch.zeros(1, 24, 24, dtype=torch.float64)])
    matrices, eps = matrices.float().double(), 1e-4
    found = inverse_root(matrices.float(), power, eps, method, torch.float64)
    values, vectors = torch.linalg.eigh(matrices)
    if method == "eigh":  # newton does not clamp eigenvalues that rounding left below 0
        values = values.clamp(min=0)
    want = (vectors * (values + eps)[:, None, :] ** (-1 / power)) @ vectors.mT
    np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-4 * want.abs().max().item())


def test_newton_returns_nan_for_a_matrix_that_does_not_converge() -> None:
    matrices = torch.eye(3).repeat(2, 1, 1)
    matrices[1] *= -1
    found = inverse_root(matrices, 2, 1e-6, "newton", torch.float64)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((3, 3, 512, 512), (9, 512, 512)),
        ((1, 1, 64, 256), (64, 256)),
        ((7, 7, 3, 64), (49, 3, 64)),
        ((2, 3, 4), (24,)),
        ((2048,), (2048,)),
        ((1, 1), (1,)),
    ],
)
def test_small_dimensions_are_merged(shape: tuple[int, ...], want: tuple[int, ...]) -> None:
    assert merge_small_dims(shape, 128) == want


@pytest.mark.parametrize("channels_last", [False, True])
def test_blocks_cover_each_element_once_in_the_order_of_dimensions(channels_last: bool) -> None:
    """In either memory order, so that a checkpoint of one order can be loaded in the other."""
    filters = torch.arange(20 * 10 * 9.0).view(20, 10, 3, 3)
    memory = filters.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    segments = [
        ParamSlice("vector", 0, 30, True, True),
        ParamSlice("filters", 32, filters.numel(), True, True, shape=(20, 10, 3, 3), strides=memory.stride()),
    ]
    flat = torch.zeros(32 + filters.numel())
    segments[1].view(flat).copy_(filters)
    stacks = stack_blocks(segments, 16, flat.device, vectors=False)
    assert {stack.shape: len(stack.block_indices) for stack in stacks} == {(9, 10, 16): 1, (9, 10, 4): 1}
    whole = filters.permute(2, 3, 1, 0).reshape(9, 10, 20)
    for stack, want in zip(stacks, (whole[..., :16], whole[..., 16:]), strict=True):
        assert torch.equal(stack.gather_blocks(flat)[0], want)
        stack.scatter_blocks(flat, -stack.gather_blocks(flat))
    assert torch.equal(segments[1].view(flat), -filters)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_rank_holds_all_roots_and_its_part_of_the_statistics(ranks: int) -> None:
    arrays = FlatArrays(draw(0), DECAYS)
    rule = Shampoo(arrays.share(), ShampooSection(block=8), ReplicaGroup(0, ranks), nesterov=True)
    roots = 4 * sum(preconditioner_elements(shape, 8, vectors=True) for shape in SHAPES.values())
    assert rule.extra_state_bytes == pytest.approx(roots + roots / ranks, rel=0.05)
