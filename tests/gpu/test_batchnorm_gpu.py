"""Batch norm on a CUDA device equals float64 on the CPU: torch's kernels, parts, compiled, and inside a CUDA graph."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


def draw(seed: int, count: int, channels: int, dtype: Any, channels_last: bool, mean: float = 0.0) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(count, channels, 9, 7, generator=generator) * 1.5 + mean).to(dtype)
    return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def layers(channels: int, world: Any, part: int | None) -> tuple[Any, Any]:
    """Return our layer on the device, in parts or as a group of one rank, and torch's in float64 on the CPU."""
    import torch
    from torch import nn

    from podscale.pytorch.batch_norm import BatchNorm

    torch.manual_seed(1)
    layer, oracle = BatchNorm(channels, momentum=0.3), nn.BatchNorm2d(channels, momentum=0.3)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    oracle.load_state_dict(layer.state_dict(), strict=False)
    layer.to(world.device)
    layer.group, layer.part_size = world.consecutive_group(1) if part is None else None, part
    return layer, oracle.double()


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    import torch

    expected = expected.detach()
    torch.testing.assert_close(
        actual.detach().double().cpu(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )


@pytest.mark.parametrize("part", [None, 6, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", TOLERANCE)
def test_a_layer_equals_the_oracle(world: Any, name: str, channels_last: bool, part: int | None) -> None:
    check_layer(world, name, channels_last, part, lambda layer: layer)


@pytest.mark.parametrize(("name", "part"), [("float32", None), ("bfloat16", None), ("bfloat16", 3)])
def test_a_compiled_layer_equals_the_oracle(world: Any, name: str, part: int | None) -> None:
    import torch

    check_layer(world, name, True, part, lambda layer: torch.compile(layer, fullgraph=True, dynamic=False))
    torch._dynamo.reset()


def check_layer(world: Any, name: str, channels_last: bool, part: int | None, prepared: Callable[[Any], Any]) -> None:
    """Compare a layer with the oracle. `part` is None for a group of this rank, 6 for the batch, 3 for two parts."""
    import torch
    from torch.nn import functional as F

    dtype, tolerance = getattr(torch, name), TOLERANCE[name]
    layer_under_test, oracle = layers(13, world, part)
    if name == "float64":
        layer_under_test.double()
    x, dy = draw(2, 6, 13, dtype, channels_last, mean=2.0), draw(3, 6, 13, dtype, channels_last)
    on_device = x.to(world.device).requires_grad_()
    y = prepared(layer_under_test)(on_device)
    y.backward(dy.to(world.device))
    exact = x.double().requires_grad_()
    size = part or 6
    states, ys = [], []
    for piece in exact.split(size):
        running = torch.zeros(13, dtype=torch.float64), torch.ones(13, dtype=torch.float64)
        ys.append(F.batch_norm(piece, *running, oracle.weight, oracle.bias, True, oracle.momentum))
        states.append(torch.stack(running))
    expected = torch.cat(ys)
    expected.backward(dy.double())
    assert y.dtype == dtype
    assert y.stride() == on_device.stride()
    assert on_device.grad is not None
    assert on_device.grad.stride() == on_device.stride()
    assert_close(y, expected, tolerance)
    assert_close(on_device.grad, exact.grad, tolerance)
    # Sums are fp32 for images of any dtype, but torch's kernels for NCHW round: by 0.4 % in bf16 on an H200.
    sums = tolerance if name == "float64" or not channels_last else TOLERANCE["float32"]
    assert_close(layer_under_test.weight.grad, oracle.weight.grad, 10 * sums)
    assert_close(layer_under_test.bias.grad, oracle.bias.grad, 10 * sums)
    assert_close(
        torch.stack([layer_under_test.running_mean, layer_under_test.running_var]), torch.stack(states).mean(0), sums
    )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_ranks_of_unequal_batches_are_normalised_as_one_batch(world: Any, channels_last: bool, mean: float) -> None:
    """Kernels and message of two ranks with 3 and 5 images, run one after the other on this device."""
    import torch

    from podscale.pytorch.batch_norm import operations
    from podscale.pytorch.batch_norm.groups import combine_moments

    batches = [draw(seed, count, 13, torch.float32, channels_last, mean) for seed, count in ((1, 3), (2, 5))]
    gradients = [draw(seed, count, 13, torch.float32, channels_last) for seed, count in ((3, 3), (4, 5))]
    xs, dys = ([t.to(world.device) for t in ts] for ts in (batches, gradients))
    all_images, oracle = torch.cat(batches).double().requires_grad_(), torch.nn.BatchNorm2d(13, momentum=1.0).double()
    expected = oracle(all_images)
    expected.backward(torch.cat(gradients).double())

    messages: list[Any] = []
    rank_moments = [(*operations.moments(x), x.numel() // x.shape[1]) for x in xs]
    for rank in rank_moments:
        combine_moments(*rank, lambda m: messages.append(m.clone()) or m, torch.float32)
    moments = combine_moments(*rank_moments[0], lambda m: torch.stack(messages).sum(0), torch.float32)
    assert_close(moments.mean, oracle.running_mean, 1e-6)
    assert_close(moments.unbiased, oracle.running_var, 1e-4)
    invstd, one = torch.rsqrt(moments.var + 1e-5), torch.ones_like(moments.mean)
    y = torch.cat([operations.normalise(x, moments.mean, invstd, one, torch.zeros_like(one)) for x in xs])
    pairs = list(zip(dys, xs, strict=True))
    rank_sums = [torch.stack(operations.gradient_sums(dy, x, moments.mean, invstd)) for dy, x in pairs]
    sums = torch.stack(rank_sums).sum(0)
    dx = [operations.input_gradient(dy, x, moments.mean, invstd, one, sums, moments.count) for dy, x in pairs]
    loose = 1e-5 if mean == 0 else 1e-3  # one step of fp32 at 1000 is 4e-5 deviations
    assert_close(y, expected, loose)
    assert_close(torch.cat(dx), all_images.grad, loose)


def test_a_group_norm_replays_in_a_graph(world: Any) -> None:
    """The layer never waits for the device, and a replay uses new images."""
    import torch

    layer, _ = layers(13, world, None)
    static = draw(1, 6, 13, torch.bfloat16, True).to(world.device).requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(static).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    static.grad = None
    with torch.cuda.graph(graph):
        y = layer(static)
        y.square().sum().backward()
    fresh = draw(5, 6, 13, torch.bfloat16, True, mean=3.0).to(world.device)
    with torch.no_grad():
        static.copy_(fresh)
    before = torch.stack([layer.running_mean, layer.running_var])
    graph.replay()
    after = torch.stack([layer.running_mean, layer.running_var])
    layer.running_mean.copy_(before[0])
    layer.running_var.copy_(before[1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = layer(fresh)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y, expected)
    assert torch.equal(after, torch.stack([layer.running_mean, layer.running_var]))
