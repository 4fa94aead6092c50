"""NLCG, Neumann and Shampoo follow their float64 oracles: in fp32, in float64 to 1e-9, and as the PyTorch engine does.

In float64 both engines run in it from the first weights on. Sharded steps, and roots shared by devices, on eight
simulated devices.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec

from podscale.config.optimizer import NeumannSection, NlcgSection, ShampooSection
from podscale.config.train import AllReduceSection
from podscale.jax.all_reduce import build_all_reduce
from podscale.jax.flat_buffers import ParamLayout
from podscale.jax.mesh import DEVICES, arrange_devices
from podscale.jax.optim import (
    FactorLayout,
    HyperParams,
    LookaheadOptimizer,
    Neumann,
    Nlcg,
    Optimizer,
    OptState,
    ParamShard,
    ReplicaAxes,
    Shampoo,
)
from podscale.pytorch import optim as torch_optim
from podscale.pytorch.optim import shampoo as torch_shampoo
from podscale.pytorch.optim.base import ReplicaGroup
from podscale.training.param_layout import ParamOptions
from tests.support import extreme
from tests.support.extreme import NORMS, bowl, loss, ml_ncg_oracle, neumann_oracle, nlcg_oracle
from tests.support.flat_share import FlatArrays
from tests.support.optimizer_oracles import DECAYS, STEPS, Values, rate, start
from tests.support.shampoo_oracle import shampoo_oracle
from tests.unit.pytorch.optim.test_shampoo import DECAYS as SHAMPOO_DECAYS
from tests.unit.pytorch.optim.test_shampoo import SHAPES as SHAMPOO_SHAPES
from tests.unit.pytorch.optim.test_shampoo import draw
from tests.unit.pytorch.optim.test_shampoo import steps as shampoo_steps

PER_EPOCH, DECAY = 10.0, 1e-2
EXACT = 1e-9
"""Tolerance in float64, of the largest change of an array."""
NLCG = [
    {},
    {"beta": "polak_ribiere", "step": "online"},
    {"step": "none", "restart_every": 7, "forget_every": 11},
    {"tolerance": 0.5, "lars_coefficient": 0.05, "norm_gradient_scale": 0.01},
]
NEUMANN = [
    {},
    {"on_reset": "move", "momentum_time": "since_reset"},
    {"moves_by": "previous", "momentum_time": "epochs", "momentum_end": 0.6, "momentum_start": 0.4},
    {"sgd_epochs": 0.0, "beta": 0.0, "alpha": 0.0},
]
SHAMPOO = [
    {"block": 8, "start_step": 3, "every_steps": 1},
    {"block": 128, "start_step": 5, "every_steps": 3, "exponent": 4, "beta2": 0.75, "eps": 1e-2, "roots": "newton"},
    {"block": 8, "every_steps": 4, "graft": "adagrad", "beta2": 1.0, "eps": 0.1, "vectors": False},
    {"block": 5, "start_step": 2, "every_steps": 9, "graft": "rmsprop", "beta2": 0.9, "exponent": 3},
]


RELEASED = [{"variant": "released"}, {"variant": "released", "beta": "polak_ribiere", "step": "online"}]


def slow_but(values: Sequence[Any], *chosen: int) -> list[Any]:
    """Return the values as parameters, all slow but those at some positions, which have every form of a step.

    Each takes a compilation of its own. In float64 all of them are tested.
    """
    return [pytest.param(it, marks=() if n in chosen else pytest.mark.slow) for n, it in enumerate(values)]


class Trajectory(NamedTuple):
    """Weights after all steps, weights to evaluate, and scalars of the state."""

    weights: Values
    evaluated: Values
    scalars: dict[str, float]


def near(found: Values, want: Values, within: float, begun: Values) -> None:
    """Assert equality within a fraction of the largest change of each array."""
    for name, value in want.items():
        scale = np.abs(value - begun[name]).max()
        np.testing.assert_allclose(found[name], value, rtol=0, atol=within * scale, err_msg=name)


def nlcg_names(options: dict[str, Any]) -> dict[str, Any]:
    names = {
        "restart_every": "restart",
        "forget_every": "forget",
        "lars_coefficient": "lars",
        "norm_gradient_scale": "norm_scale",
        "step": "mode",
    }
    return {names.get(name, name): value for name, value in options.items()}


def neumann_section(options: dict[str, Any]) -> NeumannSection:
    return NeumannSection(
        **{"sgd_epochs": 0.5, "reset_epochs": 1.0, "alpha": 1e-3, "beta": 1e-3, "gamma": 0.9, **options}
    )


def shampoo_section(options: dict[str, Any]) -> ShampooSection:
    return ShampooSection(**{"eps": 1e-3, "beta2": 0.95, "start_step": 0, **options})


def in_jax(optimizer: Optimizer, *, exact: bool, sharded: bool = False) -> Trajectory:
    """Train on the bowl of `tests.support.extreme`, on one device or with a sharded step on eight."""
    mesh = arrange_devices(jax.devices(), np.arange(8).reshape(1, 2, 4))
    reduce = build_all_reduce(AllReduceSection(algorithm="torus2d"), mesh)
    axes, shards = (reduce.axes, reduce.shards) if sharded else ((), 1)
    begun = start()
    layout = ParamLayout({n: w.shape for n, w in begun.items()}, bucket_elements=30_000, shards=shards)
    options = {name: ParamOptions(decays, decays) for name, decays in DECAYS.items()}
    table = [[rate(n), 0.9, DECAY, loss(n)] for n in range(STEPS)]

    def body(weights: Any, curvatures: Any, noise: Any, rows: Any) -> Any:
        shard = ParamShard(layout, options, axes, shards, NORMS)
        moments = {
            name: jax.tree.map(lambda w, v=value: jnp.full_like(w, v), weights)
            for name, value in optimizer.initial_moments.items()
        }
        scalars = {name: jnp.array(v, weights[0].dtype) for name, v in optimizer.initial_scalars.items()}

        def step(carry: Any, given: Any) -> Any:
            row, own_noise, number = given
            pushes = tuple(c * w + n for c, w, n in zip(curvatures, carry[0], own_noise, strict=True))
            hyper = HyperParams(*row, step=number)
            result = optimizer.step(shard, carry[0], pushes, carry[1], hyper, jnp.array(True))
            return (result.weights, result.opt_state), result.finite

        carry, finite = jax.lax.scan(step, (weights, OptState(moments, scalars)), (rows, noise, jnp.arange(STEPS)))
        evaluated = carry[0]
        if isinstance(optimizer, LookaheadOptimizer):
            evaluated = optimizer.evaluation_weights(*carry)
        return carry[0], evaluated, carry[1].scalars, finite

    if sharded:
        split, whole = PartitionSpec(axes), PartitionSpec()
        body = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(split, split, PartitionSpec(None, axes), whole),
            out_specs=(split, split, whole, whole),
            check_vma=False,
        )
    noise = [layout.pack_on_host(bowl(dict.fromkeys(begun, np.float32(0)), n)) for n in range(STEPS)]
    given = (
        layout.pack_on_host(begun),
        layout.pack_on_host(extreme.CURVATURES),
        tuple(map(np.stack, zip(*noise, strict=True))),
    )
    with jax.enable_x64(True) if exact else nullcontext():
        dtype = np.float64 if exact else np.float32
        given = jax.tree.map(lambda array: jnp.asarray(array, dtype), given)
        weights, evaluated, scalars, finite = jax.jit(body)(*given, jnp.asarray(table, dtype))
        assert np.asarray(finite).all()
        assert weights[0].dtype == dtype
        unpacked = [
            {n: np.asarray(a) for n, a in layout.unpack(map_host(buckets)).items()} for buckets in (weights, evaluated)
        ]
        return Trajectory(*unpacked, {name: float(value) for name, value in scalars.items()})


def map_host(buckets: Any) -> list[Any]:
    return [np.asarray(bucket) for bucket in buckets]


def in_torch(build: Any) -> Trajectory:
    """Train as `in_jax` with an optimizer of the PyTorch engine, in float64."""
    with torch_in_float64():
        arrays = FlatArrays(start(), DECAYS, norms=NORMS)
        optimizer = build(arrays.share())
        for n in range(STEPS):
            arrays.put(arrays.gradients, bowl(arrays.take(arrays.weights), n))
            row = torch_optim.HyperParams(*torch.tensor([rate(n), 0.9, DECAY, loss(n)]).unbind())
            assert optimizer.step(row, torch.tensor(True))
        assert arrays.weights.dtype == torch.float64
        return Trajectory(arrays.take(arrays.weights), {}, {k: float(v) for k, v in optimizer.scalars.items()})


@contextmanager
def torch_in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def nlcg_by_oracle(options: dict[str, Any]) -> tuple[Values, float]:
    """Return the weights, and the part of the learning rate that is left."""
    if options.get("variant") != "released":
        return nlcg_oracle(DECAY, DECAYS, **nlcg_names(options))
    own = {"update_rule": "PR", "line_search": "Online"} if options.get("beta") == "polak_ribiere" else {}
    return ml_ncg_oracle(DECAY, DECAYS, **own)


@pytest.mark.parametrize("options", [*NLCG, *RELEASED])
def test_nlcg_follows_its_oracle_and_the_other_engine(options: dict[str, Any]) -> None:
    section = NlcgSection(**options)
    want, base = nlcg_by_oracle(options)
    found = in_jax(Nlcg(section), exact=True)
    near(found.weights, want, EXACT, start())
    assert found.scalars["base_rate"] == pytest.approx(base, rel=1e-12)
    other = in_torch(lambda share: torch_optim.Nlcg(share, section))
    near(found.weights, other.weights, EXACT, start())
    assert found.scalars == pytest.approx(other.scalars, rel=1e-9)


@pytest.mark.parametrize("options", slow_but([*NLCG, *RELEASED], 1, 3))
def test_nlcg_in_fp32_follows_its_oracle(options: dict[str, Any]) -> None:
    want, _ = nlcg_by_oracle(options)
    near(in_jax(Nlcg(NlcgSection(**options)), exact=False).weights, want, 1e-3, start())


def neumann_by_oracle(section: NeumannSection) -> tuple[Values, Values]:
    """Return the weights, and those to evaluate."""
    return neumann_oracle(DECAY, DECAYS, section, 5 if section.sgd_epochs else 0, 10, PER_EPOCH)


@pytest.mark.parametrize("options", NEUMANN)
def test_neumann_follows_its_oracle_and_the_other_engine(options: dict[str, Any]) -> None:
    section = neumann_section(options)
    want, reached = neumann_by_oracle(section)
    found = in_jax(Neumann(section, PER_EPOCH), exact=True)
    near(found.weights, want, EXACT, start())
    near(found.evaluated, reached, EXACT, start())
    other = in_torch(lambda share: torch_optim.Neumann(share, section, PER_EPOCH))
    near(found.weights, other.weights, EXACT, start())
    assert found.scalars == pytest.approx(other.scalars, rel=1e-9)
    assert not np.allclose(found.evaluated["large"], want["large"], atol=1e-3)


@pytest.mark.parametrize("options", slow_but(NEUMANN, 1, 2))
def test_neumann_in_fp32_follows_its_oracle(options: dict[str, Any]) -> None:
    section = neumann_section(options)
    want, reached = neumann_by_oracle(section)
    single = in_jax(Neumann(section, PER_EPOCH), exact=False)
    near(single.weights, want, 2e-5, start())
    near(single.evaluated, reached, 2e-5, start())
    assert not np.allclose(single.evaluated["large"], want["large"], atol=1e-3)


@pytest.mark.parametrize(
    "optimizer", [Nlcg(NlcgSection(**NLCG[1])), Nlcg(NlcgSection(**NLCG[3])), Neumann(neumann_section({}), PER_EPOCH)]
)
def test_a_sharded_step_equals_the_unsharded_one(optimizer: Optimizer) -> None:
    """In float64 only the order of additions differs; in fp32 NLCG multiplies their rounding."""
    whole, found = in_jax(optimizer, exact=True), in_jax(optimizer, exact=True, sharded=True)
    near(found.weights, whole.weights, EXACT, start())
    assert found.scalars == pytest.approx(whole.scalars, rel=1e-9)


class ShampooRun(NamedTuple):
    weights: Values
    state: dict[str, np.ndarray[Any, Any]]


def shampoo_in_jax(section: ShampooSection, nesterov: bool, *, devices: int, exact: bool) -> ShampooRun:
    """Return weights and extra state by their names in a checkpoint, after all steps on so many devices."""
    mesh = arrange_devices(jax.devices()[:devices], np.arange(devices).reshape(1, 1, devices))
    replicas = ReplicaAxes(DEVICES, devices) if devices > 1 else ReplicaAxes()
    factors = FactorLayout(SHAMPOO_SHAPES, section, replicas)
    optimizer = Shampoo(section, nesterov, factors)
    layout = ParamLayout(SHAMPOO_SHAPES, bucket_elements=600)
    options = {name: ParamOptions(decays, decays) for name, decays in SHAMPOO_DECAYS.items()}
    dtype = np.float64 if exact else np.float32

    def body(weights: Any, extra: Any, pushes: Any, rows: Any, finites: Any) -> Any:
        shard = ParamShard(layout, options)
        moments = {name: jax.tree.map(jnp.zeros_like, weights) for name in optimizer.initial_moments}

        def step(carry: Any, given: Any) -> Any:
            row, push, number, finite = given
            push = tuple(jnp.where(finite, bucket, jnp.nan) for bucket in push)
            hyper = HyperParams(*row, loss=jnp.array(2.0), step=number)
            result = optimizer.step(shard, carry[0], push, carry[1], hyper, finite)
            return (result.weights, result.opt_state), result.finite

        given = rows, pushes, jnp.arange(STEPS), finites
        (weights, state), finite = jax.lax.scan(step, (weights, OptState(moments, {}, extra)), given)
        return weights, state.extra, finite

    whole = PartitionSpec()
    if devices > 1:
        body = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(whole, dict(factors.specs), whole, whole, whole),
            out_specs=(whole, dict(factors.specs), whole),
            check_vma=False,
        )
    steps = shampoo_steps()
    table = [[s.rate, s.momentum, s.decay] for s in steps]
    pushes = tuple(map(np.stack, zip(*[layout.pack_on_host(s.gradients) for s in steps], strict=True)))
    finite = [s.finite for s in steps]
    with jax.enable_x64(True) if exact else nullcontext():
        given: Any = layout.pack_on_host(draw(0)), factors.pack(factors.initial()), pushes, table
        given = jax.tree.map(lambda array: jnp.asarray(array, dtype), given, is_leaf=lambda x: x is table)
        weights, extra, applied = jax.jit(body)(*given, jnp.asarray(finite))
        assert np.asarray(applied).tolist() == finite
        arrays = {name: np.asarray(a) for name, a in layout.unpack(map_host(weights)).items()}
        return ShampooRun(arrays, factors.unpack({name: np.asarray(a) for name, a in extra.items()}))


def shampoo_in_torch(section: ShampooSection, nesterov: bool) -> ShampooRun:
    with torch_in_float64():
        arrays = FlatArrays(draw(0), SHAMPOO_DECAYS)
        rule = torch_shampoo.Shampoo(arrays.share(), section, ReplicaGroup(), nesterov=nesterov)
        for n, step in enumerate(shampoo_steps()):
            given = step.gradients if step.finite else {name: 0 * g for name, g in step.gradients.items()}
            row = torch_optim.HyperParams(*torch.tensor([step.rate, step.momentum, step.decay, 2.0]).unbind())
            assert arrays.step(rule, given, row, finite=step.finite, number=n) == step.finite
        return ShampooRun(arrays.take(arrays.weights), {k: t.numpy() for k, t in rule.extra_state_arrays().items()})


def shampoo_by_oracle(section: ShampooSection, nesterov: bool) -> Values:
    known = {name: value for name, value in section.model_dump().items() if name not in ("roots", "roots_precision")}
    return shampoo_oracle(draw(0), shampoo_steps(), SHAMPOO_DECAYS, nesterov=nesterov, **known)


@pytest.mark.parametrize("options", SHAMPOO)
def test_shampoo_follows_its_oracle_and_the_other_engine(options: dict[str, Any]) -> None:
    """Extra state has the names, shapes and values of the other engine's; devices share the roots."""
    nesterov = "vectors" not in options
    section = shampoo_section(options)
    want = shampoo_by_oracle(section, nesterov)
    found = shampoo_in_jax(section, nesterov, devices=8, exact=True)
    near(found.weights, want, EXACT, draw(0))
    other = shampoo_in_torch(section, nesterov)
    near(found.weights, other.weights, EXACT, draw(0))
    assert found.state.keys() == other.state.keys()
    for name, vector in other.state.items():
        scale = np.abs(vector).max()
        np.testing.assert_allclose(found.state[name], vector, rtol=0, atol=EXACT * scale, err_msg=name)


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        pytest.param(it, devices, marks=() if devices == chosen else pytest.mark.slow)
        for it, chosen in zip(SHAMPOO, (8, 1, 8, 1), strict=True)
        for devices in (1, 8)
    ],
)
def test_shampoo_in_fp32_follows_its_oracle(options: dict[str, Any], devices: int) -> None:
    nesterov, section = "vectors" not in options, shampoo_section(options)
    single = shampoo_in_jax(section, nesterov, devices=devices, exact=False)
    for name, value in shampoo_by_oracle(section, nesterov).items():
        np.testing.assert_allclose(single.weights[name], value, rtol=2e-5, atol=2e-5, err_msg=name)


def test_the_state_of_shampoo_is_packed_and_unpacked_without_loss() -> None:
    """For any number of devices, so that a run resumes on another one."""
    section = shampoo_section(SHAMPOO[0])
    generator = np.random.default_rng(3)
    layouts = [
        FactorLayout(SHAMPOO_SHAPES, section, ReplicaAxes(DEVICES, size) if size > 1 else ReplicaAxes())
        for size in (1, 3, 8)
    ]
    named = {n: generator.normal(size=a.shape).astype(np.float32) for n, a in layouts[0].initial().items()}
    for layout in layouts:
        packed = layout.pack(named)
        assert all(len(array) % layout.replicas.size == 0 for array in packed.values())
        assert packed.keys() == layout.specs.keys()
        back = layout.unpack(packed)
        assert back.keys() == named.keys()
        assert all(np.array_equal(back[name], array) for name, array in named.items())


ROOTS_ON_TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec
from podscale.config.optimizer import ShampooSection
from podscale.jax.mesh import RANKS, arrange_devices
from podscale.jax.optim import FactorLayout, ReplicaAxes

shapes = {f"w{size}.{part}": (size, 128, 3) for size in range(32, 120, 16) for part in range(4)}
section = ShampooSection()
layout = FactorLayout(shapes, section, ReplicaAxes(RANKS, 2))
draw = np.random.default_rng(0)
extra = {}
for name, value in layout.pack(layout.initial()).items():
    rows = draw.normal(size=value.shape)
    extra[name] = jnp.asarray(rows @ rows.swapaxes(1, 2), jnp.float32)
roots = jax.jit(
    jax.shard_map(
        lambda extra: layout.new_roots(extra, section, jnp.array(True)),
        mesh=arrange_devices(jax.devices(), np.arange(2).reshape(1, 1, 2)),
        in_specs=(dict(layout.specs),),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
)
for _ in range(5):
    jax.block_until_ready(roots(extra))
print(len(layout.powers))
"""


def test_roots_of_many_groups_end_on_devices_that_share_threads() -> None:
    """With as many calls of LAPACK for several matrices at a time as XLA has threads, each waits for the others."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", ROOTS_ON_TWO_DEVICES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 4
