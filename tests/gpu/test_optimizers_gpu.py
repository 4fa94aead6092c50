"""Optimizers on a CUDA device: fused kernels are right, nothing waits for the device, and a graph can hold a step."""

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["sgd", "lars", "lars, norm of sum"])
@pytest.mark.parametrize(("shards", "compact"), [(1, False), (3, False), (3, True)])
def test_fused_momentum_equals_lists_of_operations(name: str, shards: int, compact: bool) -> None:
    import torch

    pytest.importorskip("triton")
    from podscale.pytorch.optim.fused_momentum import FusedMomentum
    from podscale.pytorch.optim.sgd import ForeachMomentum
    from tests.support.optimizer_rules import RULES, updated

    on_cpu = updated(RULES[name], ForeachMomentum, "cpu", shards=shards, compact=compact)
    for momentum_update in (ForeachMomentum, FusedMomentum):
        actual = updated(RULES[name], momentum_update, "cuda", shards=shards, compact=compact)
        again = updated(RULES[name], momentum_update, "cuda", shards=shards, compact=compact)
        for a, b, c in zip(actual, again, on_cpu, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a.cpu(), c, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("name", ["sgd", "lars", "lamb", "adam", "rmsprop", "nlcg", "neumann", "muon"])
@pytest.mark.parametrize("finite", [True, False])
def test_a_step_neither_waits_for_nor_needs_the_host(name: str, finite: bool) -> None:
    """Synchronising calls are forbidden, and a replay from a graph gives the same bits."""
    import torch

    from podscale.config.optimizer import OptimizerSection
    from podscale.pytorch.optim import HyperParams, ParamShard, ParamSlice, build_optimizer

    def build() -> Any:
        torch.manual_seed(0)
        weights, gradients = torch.randn(70_016, device="cuda"), torch.randn(70_016, device="cuda")
        segments = [
            ParamSlice("a", 0, 69_970, True, True, shape=(10, 6_997), strides=(6_997, 1)),
            ParamSlice("b", 69_984, 32, False, False),
        ]  # aligned, as in a layout
        share = ParamShard(segments, [(0, 70_016)], weights, gradients)
        return weights, gradients.clone(), gradients, build_optimizer(OptimizerSection(name=name), share, 10.0)

    row = HyperParams(*torch.tensor([0.1, 0.9, 1e-2, 2.0], device="cuda").unbind())
    flag = torch.tensor(finite, device="cuda")
    plain, source, gradients, rule = build()
    rule.step(row, flag)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        gradients.copy_(source)
        rule.step(row, flag)
    torch.cuda.set_sync_debug_mode("default")

    graphed, source, gradients, rule = build()
    rule.step(row, flag)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients.copy_(source)
        rule.step(row, flag)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(plain, graphed)
    assert torch.equal(plain, build()[0]) == (not finite)


@pytest.mark.parametrize("roots", ["eigh", "newton"])
def test_shampoo_equals_a_cpus_and_waits_only_for_eigenvalues(roots: Any) -> None:
    import torch

    from podscale.config.optimizer import ShampooSection
    from podscale.pytorch.optim import HyperParams, ParamShard, ParamSlice, Shampoo
    from podscale.pytorch.optim.base import ReplicaGroup

    shapes, starts = ((40, 24, 3, 3), (64,), (10, 48)), (0, 8640, 8704)
    segments = [
        ParamSlice(
            str(n), start, torch.Size(shape).numel(), True, True, shape=shape, strides=torch.empty(shape).stride()
        )
        for n, (shape, start) in enumerate(zip(shapes, starts, strict=True))
    ]
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(9184, generator=generator) for _ in range(7)]
    states = {}
    for device in ("cpu", "cuda"):
        weights, gradients = drawn[0].to(device, copy=True), torch.zeros(9184, device=device)
        share = ParamShard(segments, [(0, 9184)], weights, gradients)
        section = ShampooSection(block=16, eps=1e-2, start_step=1, every_steps=2, roots=roots)
        rule = Shampoo(share, section, ReplicaGroup(), nesterov=True)
        row = HyperParams(*torch.tensor([0.1, 0.9, 1e-2, 2.0], device=device).unbind())
        flags = [torch.tensor(number != 4, device=device) for number in range(6)]
        step_gradients = [values.to(device) for values in drawn[1:]]
        for number in range(6):
            gradients.copy_(step_gradients[number] * flags[number])
            rule.start_step(number)
            if number == 3 and device == "cuda" and roots == "newton":  # a step that computes roots
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            rule.step(row, flags[number])
        torch.cuda.set_sync_debug_mode("default")
        states[device] = [weights, *rule.moments.values(), *rule.extra_state_arrays().values()]
    for on_cpu, on_gpu in zip(states["cpu"], states["cuda"], strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_non_finite_value_is_detected_and_masked(value: float) -> None:
    """At any position, in the large buffer or in the small one."""
    import torch

    from podscale.pytorch.train_step import all_finite, zero_nonfinite

    large, small = torch.randn(1_000_003, device="cuda"), torch.randn(33, device="cuda")
    assert bool(all_finite([large, small]))
    for buffer in (large, small):
        for index in (0, 31, len(buffer) // 2, len(buffer) - 1):
            before = buffer[index].clone()
            buffer[index] = value
            finite = all_finite([large, small])
            assert not bool(finite), (len(buffer), index)
            masked = [large.clone(), small.clone()]
            zero_nonfinite(finite, masked)
            assert not any(bool(tensor.any()) for tensor in masked)
            buffer[index] = before
