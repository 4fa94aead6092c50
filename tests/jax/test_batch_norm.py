"""Distributed batch norm equals a float64 oracle of the full batch: forward, backward and running statistics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from podscale.config.ranks import BatchNormGroup
from podscale.jax.batch_norm import BatchNorm, ChannelStatistics, assign_batch_norm_groups
from podscale.jax.mesh import RANKS, arrange_devices
from tests.support.xla import list_groups

DEVICES, CHANNELS, EPS, MOMENTUM = 8, 5, 1e-5, 0.1
Values = np.ndarray[Any, Any]


def drawn(images: int, *, mean: float = 3.0, deviation: float = 2.0) -> tuple[Values, ...]:
    """Return images, gradient of the output, weight, bias, and running mean and variance."""
    generator = np.random.default_rng(0)
    channels = np.linspace(0.5, 1.5, CHANNELS)
    x = generator.normal(size=(images, 3, 4, CHANNELS)) * deviation * channels + mean * channels
    dy, weight, bias = (generator.normal(size=shape) for shape in (x.shape, CHANNELS, CHANNELS))
    running = mean * channels + deviation, generator.uniform(0.5, 2, CHANNELS)
    return tuple(values.astype(np.float32) for values in (x, dy, weight, bias, *running))


def oracle(x: Values, dy: Values, weight: Values, bias: Values) -> dict[str, Values]:
    """Return batch norm of one group and its gradients in float64, by the formulas of Ioffe 2015."""
    x, dy, weight, bias = (values.astype(np.float64) for values in (x, dy, weight, bias))
    over, count = (0, 1, 2), x[..., 0].size
    mean, var = x.mean(over), x.var(over)
    hat = (x - mean) / np.sqrt(var + EPS)
    along = dy * weight
    dx = (along - along.mean(over) - hat * (along * hat).mean(over)) / np.sqrt(var + EPS)
    return {
        "y": hat * weight + bias,
        "dx": dx,
        "dw": (dy * hat).sum(over),
        "db": dy.sum(over),
        "mean": mean,
        "var": var * count / (count - 1),
    }


def distributed(norm: BatchNorm, group: int, x: Values, dy: Values, *arrays: Values) -> dict[str, Values]:
    """Return the same on eight devices. Gradients of weight and bias are sums, statistics are each device's."""
    mesh = arrange_devices(jax.devices(), np.arange(DEVICES).reshape(1, 2, 4), group)

    def body(x: Any, dy: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
        running = ChannelStatistics(mean, var)
        y, back, moved = jax.vjp(lambda *given: norm.train(*given, running), x, weight, bias, has_aux=True)
        dx, dw, db = back(dy)
        return y, dx, jax.lax.psum(dw, RANKS), jax.lax.psum(db, RANKS), moved.mean[None], moved.var[None]

    sharded, whole = PartitionSpec(RANKS), PartitionSpec()
    step = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(sharded, sharded, whole, whole, whole, whole),
        out_specs=(sharded, sharded, whole, whole, sharded, sharded),
        check_vma=False,
    )
    names = ("y", "dx", "dw", "db", "mean", "var")
    return dict(zip(names, map(np.asarray, jax.jit(step)(x, dy, *arrays)), strict=True))


def check(results: dict[str, Values], expected: list[dict[str, Values]], running: tuple[Values, Values]) -> None:
    """Compare with `expected`, one oracle for each group, in the order of the batch."""
    per_group = DEVICES // len(expected) if len(expected) <= DEVICES else 1
    for name in ("y", "dx"):
        whole = np.concatenate([group[name] for group in expected])
        np.testing.assert_allclose(results[name], whole, rtol=1e-4, atol=2e-5, err_msg=name)
    for name in ("dw", "db"):
        total = sum(group[name] for group in expected)
        np.testing.assert_allclose(results[name], total, rtol=1e-4, atol=2e-4, err_msg=name)
    for name, before in zip(("mean", "var"), running, strict=True):
        of_groups = np.array([group[name] for group in expected])
        if len(expected) > DEVICES:  # parts: a device has the mean over its own
            of_groups = of_groups.reshape(DEVICES, -1, CHANNELS).mean(1)
        moved = before + MOMENTUM * (np.repeat(of_groups, per_group, axis=0) - before)
        np.testing.assert_allclose(results[name], moved, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize(("group", "of_mesh"), [(1, 1), (2, 2), (4, 4), (8, 8), (1, 4), (2, 4), (2, 8), (4, 8)])
def test_a_group_is_normalised_as_its_full_batch(group: int, of_mesh: int) -> None:
    """Also a group that is a part of the mesh's, as in a phase with a larger batch."""
    x, dy, weight, bias, *running = drawn(16)
    norm = assign_batch_norm_groups(BatchNorm(EPS, MOMENTUM), BatchNormGroup(group, 2))
    results = distributed(norm, of_mesh, x, dy, weight, bias, *running)
    size = 16 // DEVICES * group
    expected = [oracle(x[at : at + size], dy[at : at + size], weight, bias) for at in range(0, 16, size)]
    check(results, expected, tuple(running))


def test_parts_of_a_batch_are_normalised_separately() -> None:
    """As for a span below a device's batch."""
    x, dy, weight, bias, *running = drawn(32)
    norm = assign_batch_norm_groups(BatchNorm(EPS, MOMENTUM), BatchNormGroup(1, 2))
    results = distributed(norm, 1, x, dy, weight, bias, *running)
    expected = [oracle(x[at : at + 2], dy[at : at + 2], weight, bias) for at in range(0, 32, 2)]
    check(results, expected, tuple(running))


def test_forward_and_backward_send_one_message_each() -> None:
    """Each message has two values per channel for any size of the group."""
    mesh = arrange_devices(jax.devices(), np.arange(DEVICES).reshape(1, 2, 4), 4)
    norm = assign_batch_norm_groups(BatchNorm(), BatchNormGroup(4, 2))

    def body(x: Any, weight: Any) -> Any:
        running = ChannelStatistics(weight, weight)
        return jax.grad(lambda x: (norm.train(x, weight, weight, running)[0] ** 2).sum())(x)

    specs = {"in_specs": (PartitionSpec(RANKS), PartitionSpec()), "out_specs": PartitionSpec(RANKS)}
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, check_vma=False, **specs))
    shapes = jax.ShapeDtypeStruct((16, 3, 4, CHANNELS), "float32"), jax.ShapeDtypeStruct((CHANNELS,), "float32")
    text = list_groups(mapped.lower(*shapes).compile().as_text())
    messages = [line for line in text.splitlines() if " all-reduce(" in line]
    assert len(messages) == 2
    assert all(f"f32[2,{CHANNELS}]" in line and "{{0,1,2,3},{4,5,6,7}}" in line for line in messages)


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (1000.0, 0.05), (-1e5, 1.0)])
def test_a_mean_far_from_zero_does_not_spoil_the_variance(mean: float, deviation: float) -> None:
    """The running mean is near, as after some steps. With plain sums the second case would have no correct digit."""
    x, _, weight, bias, near, var = drawn(16, mean=mean, deviation=deviation)
    _, moved = BatchNorm(EPS, 1.0).train(
        jnp.asarray(x), weight, bias, ChannelStatistics(jnp.asarray(near), jnp.asarray(var))
    )
    expected = oracle(x, x, weight, bias)
    np.testing.assert_allclose(moved.var, expected["var"], rtol=3e-5)
    np.testing.assert_allclose(moved.mean, expected["mean"], rtol=2e-7, atol=1e-6)


def test_bf16_images_have_fp32_statistics() -> None:
    x, _, weight, bias, near, var = drawn(16)
    short = jnp.asarray(x, jnp.bfloat16)
    y, moved = BatchNorm(EPS, 1.0).train(short, weight, bias, ChannelStatistics(jnp.asarray(near), jnp.asarray(var)))
    expected = oracle(np.asarray(short, np.float64), x, weight, bias)
    assert y.dtype == jnp.bfloat16
    assert moved.mean.dtype == moved.var.dtype == jnp.float32
    np.testing.assert_allclose(moved.var, expected["var"], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected["y"], rtol=2**-8, atol=2**-8)
