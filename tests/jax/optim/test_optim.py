"""Optimizers follow the float64 oracles of the PyTorch engine, unsharded and sharded, over 50 steps.

Those that optax defines equally are compared with optax.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from podscale import models
from podscale.config import ModelSection
from podscale.config.optimizer import OPTIMIZER_NAMES, NeumannSection, NlcgSection, OptimizerSection
from podscale.config.train import AllReduceSection
from podscale.jax.all_reduce import build_all_reduce
from podscale.jax.flat_buffers import ROW_ELEMENTS, ParamLayout
from podscale.jax.mesh import RANKS, arrange_devices
from podscale.jax.optim import (
    Adam,
    HyperParams,
    Lamb,
    Lars,
    Neumann,
    Nlcg,
    Optimizer,
    OptState,
    ParamShard,
    ReplicaAxes,
    RmsProp,
    Sgd,
    build_optimizer,
    build_param_shard,
)
from podscale.jax.optim.adaptive import bias_corrections
from podscale.training.param_layout import ParamOptions
from tests.support.optimizer_oracles import (
    DECAYS,
    EVERYTHING,
    SHAPES,
    STEPS,
    Values,
    compare,
    google_lars_2018,
    gradients,
    lamb_oracle,
    momentum,
    momentum_oracle,
    rate,
    start,
    trust_ratio,
)
from tests.support.refusals import refused

LARS = Lars(nesterov=False, trust_coefficient=0.05)
LAMB = Lamb(beta2=0.99)
BETA, DECAY = 0.9, 1e-2


def treated(decays: dict[str, bool], adapts: dict[str, bool]) -> dict[str, ParamOptions]:
    return {name: ParamOptions(decays[name], adapts[name]) for name in SHAPES}


def schedule(decay: float, beta: float | None = None) -> np.ndarray[Any, Any]:
    """Return the schedule table; `beta` is a constant momentum."""
    return np.array([[rate(step), beta or momentum(step), decay] for step in range(STEPS)], np.float32)


def initial_state(weights: Any, optimizer: Optimizer) -> OptState:
    """Return the optimizer state before the first step."""
    moments = {
        name: jax.tree.map(partial(jnp.full_like, fill_value=value), weights)
        for name, value in optimizer.initial_moments.items()
    }
    return OptState(moments, {name: jnp.array(value) for name, value in optimizer.initial_scalars.items()})


def all_gradients() -> Values:
    steps = [gradients(step) for step in range(STEPS)]
    return {name: np.stack([step[name] for step in steps]) for name in SHAPES}


def scan_steps(optimizer: Optimizer, shard: ParamShard, weights: Any, pushes: Any, table: Any) -> Any:
    """Return the weights after all steps, in the buckets of the shard. `pushes`: gradients [steps, elements]."""

    def step(carry: Any, given: Any) -> Any:
        row, push = given
        hyper = HyperParams(*row, loss=jnp.array(2.0), step=jnp.array(0))
        result = optimizer.step(shard, carry[0], push, carry[1], hyper, jnp.array(True))
        return (result.weights, result.opt_state), result.finite

    (weights, _), finite = jax.lax.scan(step, (weights, initial_state(weights, optimizer)), (table, pushes))
    return weights, finite


def trained(optimizer: Optimizer, decay: float, options: dict[str, ParamOptions], beta: float | None = None) -> Values:
    """Return the weights after all steps on one device, which steps everything."""
    layout = ParamLayout(SHAPES, bucket_elements=30_000)

    @jax.jit
    def run(weights: Any, pushes: Any, table: Any) -> Any:
        shard = ParamShard(layout, options)
        moved, finite = scan_steps(optimizer, shard, layout.pack(weights), jax.vmap(layout.pack)(pushes), table)
        return layout.unpack(moved), finite

    weights, finite = run(start(), all_gradients(), schedule(decay, beta))
    assert np.asarray(finite).all()
    return {name: np.asarray(w) for name, w in weights.items()}


def test_unpack_reverses_pack() -> None:
    layout = ParamLayout(SHAPES, bucket_elements=30_000, shards=4)
    buckets = layout.pack(start())
    assert [len(bucket) for bucket in buckets] == list(layout.lengths)
    assert len(layout.lengths) == 2  # the large array has its own bucket
    assert all(length % (4 * ROW_ELEMENTS) == 0 for length in layout.lengths)
    for name, array in layout.unpack(buckets).items():
        np.testing.assert_array_equal(array, start()[name])
    for rows, bucket in zip(layout.array_of_rows(), buckets, strict=True):
        assert len(rows) * ROW_ELEMENTS == len(bucket)
    marked = layout.pack({name: np.full(shape, number + 1) for number, (name, shape) in enumerate(SHAPES.items())})
    for rows, bucket in zip(layout.array_of_rows(), marked, strict=True):
        of_rows = np.asarray(bucket).reshape(-1, ROW_ELEMENTS).max(1)
        assert set((rows + 1)[of_rows > 0] - of_rows[of_rows > 0]) == {0}


@pytest.mark.parametrize("form", ["scaled", "unscaled", "ratio_inside"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_follows_its_oracle(form: Any, nesterov: bool) -> None:
    result = trained(Sgd(nesterov=nesterov, form=form), 1e-2, treated(DECAYS, DECAYS))
    compare(result, momentum_oracle(None, form, nesterov, 1e-2, DECAYS, dict.fromkeys(SHAPES, False)))


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

    optimizer = Lars(nesterov=nesterov, trust_coefficient=0.05, eps=eps, trust=trust, form=form, clip=clip)
    want = momentum_oracle(ratio_of, form, nesterov, decay, decays, adapts)
    compare(trained(optimizer, decay, treated(decays, adapts)), want)


def test_lars_follows_googles_code_of_2018() -> None:
    decays = {name: name != "gamma" for name in SHAPES}
    adapts = {name: name not in ("gamma", "zero") for name in SHAPES}  # "zero" is the bias, which starts at 0
    optimizer = Lars(nesterov=False, trust_coefficient=0.05, eps=0.1, trust="l2_in_loss", form="scaled")
    want = google_lars_2018(0.05, 0.05, 0.1, {"gamma"}, {"zero"})
    compare(trained(optimizer, 0.05, treated(decays, adapts)), want)


@pytest.mark.parametrize(
    ("decay", "beta2", "eps", "clip_norm", "clip", "adapts"),
    [
        (0.0, 0.99, 1e-6, 0.0, False, DECAYS),
        (1e-2, 0.999, 1e-6, 1.0, True, EVERYTHING),
        (1e-2, 0.0, 0.0, 300.0, False, DECAYS),  # clips some of the steps
    ],
)
def test_lamb_follows_its_oracle(
    decay: float, beta2: float, eps: float, clip_norm: float, clip: bool, adapts: Any
) -> None:
    optimizer = Lamb(beta2=beta2, eps=eps, clip_norm=clip_norm, clip=clip)
    compare(trained(optimizer, decay, treated(DECAYS, adapts)), lamb_oracle(decay, beta2, eps, clip_norm, clip, adapts))


@pytest.mark.parametrize("beta", [0.999, 0.9, 0.0])
def test_bias_corrections_are_exact_in_fp32(beta: float) -> None:
    """In fp32, 1 - 0.999 has an error of 3e-5. A count of 0 counts as 1."""
    counts = np.array([0, 1, 2, 1000, 10**6])
    first, second = bias_corrections(jnp.float32(counts), jnp.float32(beta), beta)
    exact = 1 / (1 - beta ** np.maximum(counts, 1))
    np.testing.assert_allclose(second, np.sqrt(exact), rtol=1e-6)
    if beta != 0.999:  # the scheduled one is fp32
        np.testing.assert_allclose(first, exact, rtol=1e-6)


def of_optax(rule: Any) -> Values:
    """Return the weights of an optax transformation after the same gradients."""
    import optax

    weights: Any = {name: jnp.asarray(array) for name, array in start().items()}

    def step(carry: Any, push: Any) -> Any:
        updates, state = rule.update(push, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    (moved, _), _ = jax.lax.scan(step, (weights, rule.init(weights)), all_gradients())
    return {name: np.asarray(array) for name, array in moved.items()}


def optax_rate(count: Any) -> Any:
    return jnp.array([rate(step) for step in range(STEPS)], jnp.float32)[count]


def test_lamb_of_optax() -> None:
    """optax's LAMB does not clip, and scales every array."""
    optax = pytest.importorskip("optax")
    want = of_optax(optax.lamb(optax_rate, BETA, 0.99, eps=1e-6, weight_decay=DECAY, mask=DECAYS))
    optimizer = Lamb(beta2=0.99, eps=1e-6, clip_norm=0.0)
    compare(trained(optimizer, DECAY, treated(DECAYS, EVERYTHING), BETA), want)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_of_optax(decoupled: bool) -> None:
    optax = pytest.importorskip("optax")
    if decoupled:
        theirs = optax.adamw(optax_rate, BETA, 0.99, eps=1e-6, weight_decay=DECAY, mask=DECAYS)
    else:
        theirs = optax.chain(optax.add_decayed_weights(DECAY, DECAYS), optax.adam(optax_rate, BETA, 0.99, eps=1e-6))
    optimizer = Adam(beta2=0.99, eps=1e-6, decoupled=decoupled)
    compare(trained(optimizer, DECAY, treated(DECAYS, DECAYS), BETA), of_optax(theirs))


@pytest.mark.parametrize(("variant", "eps", "initial"), [("torch", 1e-6, 0.0), ("tensorflow", 1.0, 1.0)])
def test_rmsprop_of_optax(variant: Any, eps: float, initial: float) -> None:
    """optax's RMSProp has the rate in the momentum buffer."""
    optax = pytest.importorskip("optax")
    theirs = optax.rmsprop(
        optax_rate, 0.95, eps, initial_scale=initial, eps_in_sqrt=variant == "tensorflow", momentum=BETA
    )
    optimizer = RmsProp(decay=0.95, eps=eps, variant=variant, form="unscaled")
    weights = trained(optimizer, DECAY, treated(DECAYS, DECAYS), BETA)
    compare(weights, of_optax(optax.chain(optax.add_decayed_weights(DECAY, DECAYS), theirs)))


def sharded_steps(optimizer: Optimizer, algorithm: Any, layout: ParamLayout, options: dict[str, ParamOptions]) -> Any:
    """Return the jitted function of weights, gradients and schedule to the weights after all steps of eight devices."""
    mesh = arrange_devices(jax.devices(), np.arange(8).reshape(1, 2, 4))
    reduce = build_all_reduce(AllReduceSection(algorithm=algorithm), mesh)

    def body(weights: Any, pushes: Any, table: Any) -> Any:
        shard = ParamShard(layout, options, reduce.axes, reduce.shards)
        moved, finite = scan_steps(optimizer, shard, weights, pushes, table)
        return moved, finite[None]

    split, steps_split = PartitionSpec(reduce.axes), PartitionSpec(None, reduce.axes)
    in_specs, out_specs = (split, steps_split, PartitionSpec()), (split, PartitionSpec(RANKS))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


@pytest.mark.parametrize(
    ("optimizer", "algorithm", "shards", "norms", "tolerance"),
    [(LARS, "torus2d", 4, [2], 1e-6), (LARS, "flat", 8, [2], 1e-6), (LAMB, "torus2d", 4, [1, 2], 1e-5)],
)
def test_a_sharded_step_equals_the_unsharded_one(
    optimizer: Optimizer, algorithm: Any, shards: int, norms: list[int], tolerance: float
) -> None:
    """Each device holds only its shard. `norms` has the values per array of each small message."""
    layout, options = ParamLayout(SHAPES, bucket_elements=30_000, shards=shards), treated(DECAYS, DECAYS)
    given = layout.pack(start()), jax.vmap(layout.pack)(all_gradients()), schedule(1e-2)
    compiled = sharded_steps(optimizer, algorithm, layout, options).lower(*given).compile()
    messages = [line for line in compiled.as_text().splitlines() if " all-reduce(" in line]
    assert len(messages) == len(norms)
    assert all(f"f32[{1 + times * len(SHAPES)}]" in line for times, line in zip(norms, messages, strict=True))
    moved, finite = compiled(*given)
    assert np.asarray(finite).all()
    result = {name: np.asarray(array) for name, array in layout.unpack(moved).items()}
    for name, whole in trained(optimizer, 1e-2, options).items():
        np.testing.assert_allclose(result[name], whole, rtol=tolerance, atol=tolerance, err_msg=name)


def test_fewer_parameters_than_devices_are_sharded_over_all_of_them() -> None:
    """Seven of the eight devices hold padding alone."""
    options, found = {"filter": ParamOptions(True, True)}, []
    weights, generator = np.array([1.0, -2.0, 0.5], np.float32), np.random.default_rng(0)
    gradients = generator.normal(size=(STEPS, 3)).astype(np.float32)
    for shards in (1, 8):
        layout = ParamLayout({"filter": (3,)}, bucket_elements=30_000, shards=shards)
        given = layout.pack({"filter": weights}), jax.vmap(layout.pack)({"filter": gradients}), schedule(1e-2)
        if shards == 1:
            moved, finite = jax.jit(partial(scan_steps, LARS, ParamShard(layout, options)))(*given)
        else:
            moved, finite = sharded_steps(LARS, "flat", layout, options)(*given)
            assert layout.lengths == (8 * ROW_ELEMENTS,)
        assert np.asarray(finite).all()
        found.append(np.asarray(layout.unpack(moved)["filter"]))
    assert not np.allclose(found[0], weights, atol=1e-3)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


def test_a_non_finite_step_changes_nothing() -> None:
    """One device sees a NaN in its shard; all of them keep weights and moments, to the bit."""
    mesh = arrange_devices(jax.devices(), np.arange(8).reshape(1, 2, 4))
    reduce = build_all_reduce(AllReduceSection(algorithm="flat"), mesh)
    layout = ParamLayout(SHAPES, bucket_elements=30_000, shards=8)

    @partial(jax.jit, static_argnums=0)
    def after(optimizer: Optimizer, bad: Any, weights: Any, push: Any) -> Any:
        def body(bad: Any, weights: Any, push: Any) -> Any:
            shard = ParamShard(layout, treated(DECAYS, DECAYS), reduce.axes, reduce.shards)
            hyper = HyperParams(*map(jnp.array, (0.1, 0.9, 1e-2, 2.0, 3)))
            push = tuple(jnp.where(bad[0], jnp.nan, bucket) for bucket in push)
            moments = {name: jax.tree.map(jnp.abs, weights) for name in optimizer.initial_moments}
            opt_state = OptState(moments, dict.fromkeys(optimizer.initial_scalars, jnp.float32(3)))
            result = optimizer.step(shard, weights, push, opt_state, hyper, ~bad[0])
            scalars = {name: scalar[None] for name, scalar in result.opt_state.scalars.items()}
            return result.weights, result.opt_state.moments, scalars, result.finite[None]

        split = PartitionSpec(reduce.axes)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        return mapped(bad, weights, push)

    weights, push = layout.pack(start()), layout.pack(gradients(1))
    before = [np.abs(bucket) for bucket in weights]
    nlcg = Nlcg(NlcgSection(beta="polak_ribiere", lars_coefficient=0.01))
    neumann = Neumann(NeumannSection(sgd_epochs=0.2, beta=0), 10.0)
    for optimizer in (LARS, Sgd(nesterov=True), LAMB, Adam(), RmsProp(), nlcg, neumann):
        for bad_one in (None, 5):
            moved, moments, scalars, finite = after(optimizer, np.arange(8) == bad_one, weights, push)
            assert (np.asarray(finite) == (bad_one is None)).all()
            assert scalars.keys() == optimizer.initial_scalars.keys()
            for name, values in scalars.items():
                if bad_one is not None or name == "updates":
                    assert (np.asarray(values) == 3 + (bad_one is None)).all(), name
            for kept, old in ((moved, weights), *((buckets, before) for buckets in moments.values())):
                same = all(np.array_equal(a, b) for a, b in zip(kept, old, strict=True))
                assert same or bad_one is None
                assert not same or bad_one is not None or kept is not moved


def built(section: OptimizerSection) -> Optimizer:
    return build_optimizer(section, SHAPES, 10.0, ReplicaAxes())


def test_the_document_chooses_the_optimizer_and_its_options() -> None:
    section = ModelSection(name="resnet18", width=4, stem="small")
    spec = models.model_spec(section, 10)
    layout = ParamLayout({p.name: p.shape for p in spec.parameters}, bucket_elements=10**6)
    chosen = OptimizerSection(name="lars", trust_coefficient=0.02, nesterov=True, skip=("fc.*",), adapt_all=True)
    assert built(chosen) == Lars(nesterov=True, trust_coefficient=0.02)
    larc = chosen.model_copy(
        update={"eps": 1e-5, "trust": "norm_of_sum", "momentum_form": "scaled", "trust_clip": True}
    )
    assert built(larc) == Lars(
        nesterov=True, trust_coefficient=0.02, eps=1e-5, trust="norm_of_sum", form="scaled", clip=True
    )
    assert built(OptimizerSection(nesterov=True, momentum_form="unscaled")) == Sgd(True, "unscaled")
    shard = build_param_shard(chosen, layout, spec)
    names = [p.name for p in spec.parameters]
    assert {name for name, decays in zip(names, shard.uses_weight_decay, strict=True) if decays} == {
        p.name for p in spec.parameters if p.role == "weight" and p.name != "fc.weight"
    }
    assert {name for name, adapts in zip(names, shard.uses_trust_ratio, strict=True) if not adapts} == {
        "fc.weight",
        "fc.bias",
    }
    with refused("resnet18", field="train.optimizer.skip", got="head.*"):
        build_param_shard(OptimizerSection(skip=("head.*",)), layout, spec)
    lamb = OptimizerSection(name="lamb", beta2=0.9, clip_norm=0, trust_clip=True)
    assert built(lamb) == Lamb(beta2=0.9, eps=1e-6, clip_norm=0.0, clip=True)
    adam = OptimizerSection(name="adam", adam={"decoupled": True})
    assert built(adam) == Adam(beta2=0.999, eps=1e-8, decoupled=True)
    rmsprop = built(OptimizerSection(name="rmsprop", rmsprop={"variant": "tensorflow", "decay": 0.8}))
    assert rmsprop == RmsProp(decay=0.8, eps=1e-8, variant="tensorflow")
    assert rmsprop.initial_moments == {"momentum": 0.0, "variance": 1.0}


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_each_optimizer_of_a_document_is_built(name: Any) -> None:
    assert type(built(OptimizerSection(name=name))).__name__.lower() == name
