"""The update rules against the float64 oracles of the PyTorch engine's, whole and sharded, over 50 steps."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from podscale import models
from podscale.config import ModelSection
from podscale.config.model import AllReduceSection
from podscale.config.optimizer import OptimizerSection
from podscale.decay import Treatment
from podscale.errors import InputError
from podscale.jax.allreduce import build_all_reduce
from podscale.jax.gradients import ROW, Layout
from podscale.jax.mesh import RANKS, arrange
from podscale.jax.optim import Hyper, Share, build_optimizer, build_share, lars, sgd
from tests.support.updates import (
    DECAYS,
    EVERYTHING,
    SHAPES,
    STEPS,
    Values,
    compare,
    gradients,
    momentum,
    momentum_oracle,
    rate,
    start,
    trust_ratio,
)

LARS = partial(lars, nesterov=False, trust_coefficient=0.05)


def treated(decays: dict[str, bool], adapts: dict[str, bool]) -> dict[str, Treatment]:
    return {name: Treatment(decays[name], adapts[name]) for name in SHAPES}


def schedule(decay: float) -> np.ndarray[Any, Any]:
    return np.array([[rate(step), momentum(step), decay] for step in range(STEPS)], np.float32)


def all_gradients() -> Values:
    steps = [gradients(step) for step in range(STEPS)]
    return {name: np.stack([step[name] for step in steps]) for name in SHAPES}


def scanned(rule: Any, share: Share, layout: Layout, weights: Any, pushes: Any, table: Any) -> Any:
    """The weights after all steps, in the buckets of the share. pushes: bucket by bucket [steps, elements]."""

    def step(carried: Any, given: Any) -> Any:
        row, push = given
        moved = rule(share, carried[0], push, carried[1], Hyper(*row), jnp.array(True))
        return (moved.weights, moved.moments), moved.finite

    moments = {"momentum": jax.tree.map(jnp.zeros_like, weights)}
    (weights, _), finite = jax.lax.scan(step, (weights, moments), (table, pushes))
    return weights, finite


def trained(rule: Any, decay: float, treatments: dict[str, Treatment]) -> Values:
    """On one device that updates everything."""
    layout = Layout(SHAPES, bucket_elements=30_000)

    @jax.jit
    def run(weights: Any, pushes: Any, table: Any) -> Any:
        share = Share(layout, treatments)
        moved, finite = scanned(rule, share, layout, layout.pack(weights), jax.vmap(layout.pack)(pushes), table)
        return layout.unpack(moved), finite

    weights, finite = run(start(), all_gradients(), schedule(decay))
    assert np.asarray(finite).all()
    return {name: np.asarray(w) for name, w in weights.items()}


def test_the_layout_takes_every_array_there_and_back() -> None:
    layout = Layout(SHAPES, bucket_elements=30_000, shards=4)
    buckets = layout.pack(start())
    assert [len(bucket) for bucket in buckets] == list(layout.lengths)
    assert len(layout.lengths) == 2  # the large array is one of its own
    assert all(length % (4 * ROW) == 0 for length in layout.lengths)
    for name, array in layout.unpack(buckets).items():
        np.testing.assert_array_equal(array, start()[name])
    for rows, bucket in zip(layout.rows(), buckets, strict=True):
        assert len(rows) * ROW == len(bucket)
    marked = layout.pack({name: np.full(shape, number + 1) for number, (name, shape) in enumerate(SHAPES.items())})
    for rows, bucket in zip(layout.rows(), marked, strict=True):
        of_rows = np.asarray(bucket).reshape(-1, ROW).max(1)
        assert set((rows + 1)[of_rows > 0] - of_rows[of_rows > 0]) == {0}


@pytest.mark.parametrize("form", ["scaled", "unscaled", "ratio_inside"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_follows_its_oracle(form: Any, nesterov: bool) -> None:
    found = trained(partial(sgd, nesterov=nesterov, form=form), 1e-2, treated(DECAYS, DECAYS))
    compare(found, momentum_oracle(None, form, nesterov, 1e-2, DECAYS, dict.fromkeys(SHAPES, False)))


@pytest.mark.parametrize(
    ("form", "trust", "nesterov", "decay", "eps", "clip", "decays", "adapts"),
    [
        ("unscaled", "sum_of_norms", False, 1e-2, 0.0, False, DECAYS, DECAYS),  # MLPerf reference
        ("scaled", "sum_of_norms", False, 1e-2, 1e-5, False, DECAYS, DECAYS),  # Kumar 2019, "scaled"
        ("unscaled", "norm_of_sum", True, 1e-2, 0.0, False, EVERYTHING, EVERYTHING),  # optax
        ("ratio_inside", "sum_of_norms", True, 1e-2, 1e-8, True, DECAYS, EVERYTHING),  # timm
        ("scaled", "norm_of_sum", True, 0.0, 1e-1, True, EVERYTHING, DECAYS),
        ("unscaled", "sum_of_norms", True, 0.0, 0.0, False, DECAYS, EVERYTHING),
    ],
)
def test_lars_follows_its_oracle(
    form: Any, trust: Any, nesterov: bool, decay: float, eps: float, clip: bool, decays: Any, adapts: Any
) -> None:
    def ratio_of(w: Any, g: Any, own_decay: float, rate: float) -> float:
        ratio = trust_ratio(w, g, own_decay, 0.05, eps, trust)
        return min(ratio / rate if rate else np.inf, 1.0) if clip else ratio

    rule = partial(lars, nesterov=nesterov, trust_coefficient=0.05, eps=eps, trust=trust, form=form, clip=clip)
    want = momentum_oracle(ratio_of, form, nesterov, decay, decays, adapts)
    compare(trained(rule, decay, treated(decays, adapts)), want)


@pytest.mark.parametrize(("algorithm", "shards"), [("torus2d", 4), ("flat", 8)])
def test_a_sharded_update_is_the_whole_one(algorithm: Any, shards: int) -> None:
    """Each device holds its shard alone; the norms travel in one small message a step."""
    mesh = arrange(jax.devices(), np.arange(8).reshape(1, 2, 4))
    reduce = build_all_reduce(AllReduceSection(algorithm=algorithm), mesh)
    layout = Layout(SHAPES, bucket_elements=30_000, shards=shards)
    treatments = treated(DECAYS, DECAYS)

    def body(weights: Any, pushes: Any, table: Any) -> Any:
        share = Share(layout, treatments, reduce.axes, reduce.shards)
        moved, finite = scanned(LARS, share, layout, weights, pushes, table)
        return moved, finite[None]

    split, steps_split = PartitionSpec(reduce.axes), PartitionSpec(None, reduce.axes)
    step = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(split, steps_split, PartitionSpec()),
        out_specs=(split, PartitionSpec(RANKS)),
        check_vma=False,
    )
    given = layout.pack(start()), jax.vmap(layout.pack)(all_gradients()), schedule(1e-2)
    compiled = jax.jit(step).lower(*given).compile()
    messages = [line for line in compiled.as_text().splitlines() if " all-reduce(" in line]
    assert len(messages) == 1
    assert f"f32[{1 + 2 * len(SHAPES)}]" in messages[0]
    moved, finite = compiled(*given)
    assert np.asarray(finite).all()
    found = {name: np.asarray(array) for name, array in layout.unpack(moved).items()}
    for name, whole in trained(LARS, 1e-2, treatments).items():
        np.testing.assert_allclose(found[name], whole, rtol=1e-6, atol=1e-6, err_msg=name)


def test_an_update_that_is_not_finite_anywhere_changes_nothing() -> None:
    """One device sees a NaN in its shard; all of them keep weights and momentum, to the bit."""
    mesh = arrange(jax.devices(), np.arange(8).reshape(1, 2, 4))
    reduce = build_all_reduce(AllReduceSection(algorithm="flat"), mesh)
    layout = Layout(SHAPES, bucket_elements=30_000, shards=8)

    @partial(jax.jit, static_argnums=0)
    def after(rule: Any, bad: Any, weights: Any, push: Any) -> Any:
        def body(bad: Any, weights: Any, push: Any) -> Any:
            share = Share(layout, treated(DECAYS, DECAYS), reduce.axes, reduce.shards)
            hyper = Hyper(jnp.array(0.1), jnp.array(0.9), jnp.array(1e-2))
            push = tuple(jnp.where(bad[0], jnp.nan, bucket) for bucket in push)
            moved = rule(share, weights, push, {"momentum": weights}, hyper, ~bad[0])
            return moved.weights, moved.moments, moved.finite[None]

        split = PartitionSpec(reduce.axes)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        return mapped(bad, weights, push)

    weights, push = layout.pack(start()), layout.pack(gradients(1))
    for rule in (LARS, partial(sgd, nesterov=True)):
        for bad_one in (None, 5):
            moved, moments, finite = after(rule, np.arange(8) == bad_one, weights, push)
            assert (np.asarray(finite) == (bad_one is None)).all()
            for kept in (moved, moments["momentum"]):
                same = all(np.array_equal(a, b) for a, b in zip(kept, weights, strict=True))
                assert same == (bad_one is not None)


def test_the_document_chooses_the_rule_and_what_it_skips() -> None:
    section = ModelSection(name="resnet18", width=4, stem="small")
    spec = models.spec(section, 10)
    layout = Layout({p.name: p.shape for p in spec.parameters}, bucket_elements=10**6)
    chosen = OptimizerSection(name="lars", trust_coefficient=0.02, nesterov=True, skip=("fc.*",), adapt_all=True)
    rule = build_optimizer(chosen)
    assert rule.func is lars
    assert rule.keywords == {
        "nesterov": True,
        "trust_coefficient": 0.02,
        "eps": 0.0,
        "trust": "sum_of_norms",
        "form": "unscaled",
        "clip": False,
    }
    share = build_share(chosen, layout, spec)
    names = [p.name for p in spec.parameters]
    assert {name for name, decays in zip(names, share.decays, strict=True) if decays} == {
        p.name for p in spec.parameters if p.role == "weight" and p.name != "fc.weight"
    }
    assert {name for name, adapts in zip(names, share.adapts, strict=True) if not adapts} == {"fc.weight", "fc.bias"}
    with pytest.raises(InputError, match=r"no parameter of resnet18 is called 'head\.\*'"):
        build_share(OptimizerSection(skip=("head.*",)), layout, spec)
    with pytest.raises(InputError, match=r"optimizer\.name lamb: the JAX engine has sgd and lars"):
        build_optimizer(OptimizerSection(name="lamb"))
