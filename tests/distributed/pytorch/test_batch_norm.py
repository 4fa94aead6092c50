"""Batch norm over groups of ranks and parts of batches equals batch norm of the same images in float64."""

import logging
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from podscale.config.ranks import BatchNormGroup
from podscale.pytorch.all_reduce import FlatAllReduce
from podscale.pytorch.batch_norm import BatchNorm, assign_batch_norm_groups
from podscale.pytorch.batch_norm.layer import RunningStatistics
from podscale.pytorch.reducer import BucketedReducer
from podscale.pytorch.world import World

MOMENTUM = 0.3


class Case(NamedTuple):
    """One test case: size of the group, images, dtype and memory order."""

    ranks: int
    images: int
    channels: int = 5
    batch: int = 4
    uneven: bool = False
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    def size(self, rank: int) -> int:
        return self.batch + (rank if self.uneven else 0)

    def draw(self, rank: int, stream: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * stream + rank)
        x = torch.randn(self.size(rank), self.channels, 5, 3, generator=generator, dtype=torch.float64)
        x = (x * (1 + 0.2 * rank) + 0.5 * rank).to(self.dtype)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x

    def layer(self) -> BatchNorm:
        layer = BatchNorm(self.channels, momentum=MOMENTUM)
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2, self.channels))
            layer.bias.copy_(torch.linspace(-1, 1, self.channels))
        return layer.double() if self.dtype == torch.float64 else layer


def cases(world: int) -> list[Case]:
    groups = [ranks for ranks in (1, 2, 4, 8) if world % ranks == 0]
    cases_ = [
        Case(ranks, 4, channels, 4, uneven, dtype, last)
        for ranks, channels, uneven, dtype, last in product(
            groups, (1, 5, 64), (False, True), (torch.float32, torch.float64), (False, True)
        )
        if not (uneven and ranks == 1) and (channels == 5 or (dtype == torch.float32 and world == 2))
    ]
    cases_ += [Case(ranks, 4, 5, 4, False, torch.bfloat16, last) for ranks in groups for last in (False, True)]
    if world > 2:
        return cases_
    cases_ += [
        Case(1, part, 5, 8, dtype=dtype, channels_last=last)
        for part, dtype, last in product((1, 2, 4, 8), (torch.float32, torch.float64), (False, True))
    ]
    return [*cases_, Case(1, 3, 5, 8), Case(1, 5, 5, 4), Case(1, 4, 5, 9, dtype=torch.bfloat16, channels_last=True)]


def normalise(world: World, case: Case) -> dict[str, Tensor]:
    layer = case.layer()
    assign_batch_norm_groups(nn.Sequential(layer), world, BatchNormGroup(case.ranks, case.images))
    x = case.draw(world.rank, 1).requires_grad_()
    y = layer(x)
    y.backward(case.draw(world.rank, 2))
    assert y.dtype == x.dtype
    assert y.stride() == x.stride()
    assert x.grad is not None
    assert x.grad.stride() == x.stride()
    return {
        "y": y.detach(),
        "dx": x.grad,
        "weight": layer.weight.grad,
        "bias": layer.bias.grad,
        "mean": layer.running_mean,
        "var": layer.running_var,
        "evaluated": layer.eval()(case.draw(7, 3)).detach(),
    }


class Oracle:
    """torch's batch norm in float64 over images that share statistics, of the ranks' concatenated batches."""

    def __init__(self, case: Case, x: Tensor, dy: Tensor) -> None:
        mine = case.layer()
        layer = nn.BatchNorm2d(case.channels, momentum=MOMENTUM)
        layer.load_state_dict(mine.state_dict(), strict=False)
        self.layer = layer.double()
        x = x.double().requires_grad_()
        y = self.layer(x)
        y.backward(dy.double())
        self.y, self.dx = y.detach(), x.grad


def split_sizes(case: Case, size: int) -> list[int]:
    """Return the sizes of the parts. A remainder joins the last one; a batch of less than two parts is one part."""
    parts = max(1, size // case.images)
    return [case.images] * (parts - 1) + [size - (parts - 1) * case.images]


def check(case: Case, ranks: range, results: list[dict[str, Tensor]]) -> None:
    """Compare the `results` of one group of ranks with one oracle, or of one rank with an oracle for each part."""
    x = torch.cat([case.draw(rank, 1) for rank in ranks])
    dy = torch.cat([case.draw(rank, 2) for rank in ranks])
    sizes = [len(x)] if case.ranks > 1 else split_sizes(case, len(x))
    oracles = [Oracle(case, *pieces) for pieces in zip(x.split(sizes), dy.split(sizes), strict=True)]
    layers = [oracle.layer for oracle in oracles]
    exact = {torch.float64: 1e-11, torch.float32: 3e-6, torch.bfloat16: 2e-2}[case.dtype]

    def close(name: str, got: Tensor, expected: Tensor, tolerance: float = exact) -> None:
        expected = expected.detach()
        np.testing.assert_allclose(
            got.double().numpy(), expected.numpy(), rtol=tolerance, atol=tolerance * float(expected.abs().max()),
            err_msg=f"{name} {case}",
        )  # fmt: skip

    close("y", torch.cat([f["y"] for f in results]), torch.cat([o.y for o in oracles]))
    close("dx", torch.cat([f["dx"] for f in results]), torch.cat([o.dx for o in oracles]))
    local = 1e-11 if case.dtype == torch.float64 else 1e-5  # sums and statistics are fp32 for images of any dtype
    for name in ("weight", "bias"):  # each rank has its part of the sum; averaging the gradients adds the parts
        expected = torch.stack([getattr(layer, name).grad for layer in layers]).sum(0)
        close(name, torch.stack([f[name] for f in results]).sum(0), expected, local)
    mean = torch.stack([layer.running_mean for layer in layers]).mean(0)
    var = torch.stack([layer.running_var for layer in layers]).mean(0)
    for f in results:
        close("mean", f["mean"], mean, local)
        close("var", f["var"], var, local)
        layers[0].running_mean.copy_(mean)
        layers[0].running_var.copy_(var)
        close("evaluated", f["evaluated"], layers[0].eval()(case.draw(7, 3).double()))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_images_that_share_statistics_are_normalised_as_one_batch(run_world: Any, size: int) -> None:
    results = run_world(size, lambda world: [normalise(world, case) for case in cases(size)])
    for number, case in enumerate(cases(size)):
        for first in range(0, size, case.ranks):
            ranks = range(first, first + case.ranks)
            check(case, ranks, [results[rank][number] for rank in ranks])
            for rank in ranks:
                for name in ("mean", "var"):
                    assert torch.equal(results[rank][number][name], results[first][number][name]), (case, name)


def far_from_zero(world: World) -> list[tuple[Tensor, ...]]:
    """Normalise images of mean 1000 (1000.1 on the second rank) and deviation 0.05, in both memory orders."""
    results = []
    for order in (torch.contiguous_format, torch.channels_last):
        layer = BatchNorm(3, momentum=1.0)
        assign_batch_norm_groups(nn.Sequential(layer), world, BatchNormGroup(2, 8))
        x = torch.randn(8, 3, 20, 20, generator=torch.Generator().manual_seed(world.rank)) * 0.05 + 1000
        x = (x + 0.1 * world.rank).contiguous(memory_format=order).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        assert x.grad is not None
        results.append((x.detach(), y.detach(), layer.running_mean, layer.running_var))
    return results


def test_a_large_mean_does_not_spoil_the_variance(run_world: Any) -> None:
    """Sums of squares in fp32 would have an error of 0.06 in a variance of 0.005."""
    for (x, y, mean, var), (other, _, _, _) in zip(*run_world(2, far_from_zero), strict=True):
        both = torch.cat([x, other]).double()
        want_var, want_mean = torch.var_mean(both, dim=(0, 2, 3))
        np.testing.assert_allclose(var.numpy(), want_var.numpy(), rtol=1e-5)
        np.testing.assert_allclose(mean.numpy(), want_mean.numpy(), rtol=2e-7)
        expected = (x.double() - want_mean.view(1, -1, 1, 1)) / (both.var((0, 2, 3), correction=0) + 1e-5).sqrt().view(
            1, -1, 1, 1
        )
        np.testing.assert_allclose(
            y.numpy(), expected.numpy(), atol=5e-3
        )  # one step of fp32 at 1000 is 1e-3 deviations


def small_network() -> nn.Module:
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 5), (5, 7), (7, 6)):
        blocks += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), BatchNorm(outputs), nn.ReLU()]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(6 * 36, 4)).to(memory_format=torch.channels_last)


def train_steps(world: World, ranks: int, overlap: bool) -> list[Tensor]:
    """Return the parameters after some steps with buckets of a few values, so that the queue is always busy."""
    model = small_network()
    assign_batch_norm_groups(model, world, BatchNormGroup(ranks, 4))
    reducer = BucketedReducer(model, FlatAllReduce(world), world, bucket_mb=1e-4, overlap=overlap)
    assert len(reducer.buffer.layout.bounds) == len(list(model.parameters())) + 1
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * step + world.rank)
        reducer.start_step()
        images = torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        labels = torch.randint(0, 4, (4,), generator=generator)
        reducer.backward(nn.functional.cross_entropy(reducer.module(images), labels), last=True)
        reducer.finish()
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), reducer.buffer.views, strict=True):
                parameter -= 0.1 * gradient
    reducer.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_messages_of_batch_norm_and_of_gradients_overlap(run_world: Any) -> None:
    """Two threads send at the same time, each in its own group. The result has the bits of sending in sequence."""

    def body(world: World) -> list[list[Tensor]]:
        return [train_steps(world, ranks, overlap) for ranks in (2, 4) for overlap in (True, False)]

    ranks = run_world(4, body, seconds=60)
    for overlapped, plain in ((0, 1), (2, 3)):
        for result in ranks:
            assert all(torch.equal(a, b) for a, b in zip(result[overlapped], ranks[0][plain], strict=True))
    assert not torch.equal(ranks[0][0][0], ranks[0][2][0])


def compiled_and_not(world: World) -> list[tuple[str, Tensor, Tensor]]:
    """Return outputs, gradients and running statistics with and without torch.compile, as one graph without a break."""
    results = []
    for span, dtype in (
        (BatchNormGroup(2, 4), torch.float32),
        (BatchNormGroup(2, 4), torch.bfloat16),
        (BatchNormGroup(1, 2), torch.float32),
    ):
        sides = []
        for compiled in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), BatchNorm(5), nn.ReLU()).to(
                memory_format=torch.channels_last
            )
            assign_batch_norm_groups(model, world, span)
            statistics = RunningStatistics(model)
            forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            generator = torch.Generator().manual_seed(world.rank)
            images = torch.randn(5, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                    y = forward(images)
                y.float().square().mean().backward()
            assert y.dtype == dtype
            assert y.is_contiguous(memory_format=torch.channels_last)
            sides.append([y.float().detach(), *(p.grad for p in model.parameters()), statistics.flat])
        results += [(f"{span} {dtype}", *pair) for pair in zip(*sides, strict=True)]
    return results


@pytest.mark.slow
def test_a_compiled_network_equals_the_eager_one(run_world: Any) -> None:
    for results in run_world(2, compiled_and_not):
        assert len(results) == 3 * 5
        for what, plain, compiled in results:
            np.testing.assert_allclose(
                compiled.numpy(), plain.numpy(), rtol=1e-4, atol=1e-5 * float(plain.abs().max()), err_msg=what
            )


def over_nodes(world: World) -> list[str]:
    """Return the warnings for groups of 1, 2 and 4 ranks on nodes of two ranks."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("podscale.pytorch.batch_norm.layer").addHandler(handler)
    for ranks in (1, 2, 4):
        assign_batch_norm_groups(
            nn.Sequential(BatchNorm(3)), replace(world, node=world.rank // 2), BatchNormGroup(ranks, 4)
        )
    return warnings


def test_one_warning_is_logged_for_groups_that_span_nodes(run_world: Any) -> None:
    first, *others = run_world(4, over_nodes)
    assert [line.split(":")[0] for line in first] == ["batch-norm groups of 4 ranks span nodes"]
    assert others == [[], [], []]


def test_running_statistics_are_averaged_or_restored() -> None:
    model = nn.Sequential(BatchNorm(3), BatchNorm(2))
    statistics, change = RunningStatistics(model), torch.empty(10)
    assert len(statistics) == 10
    statistics.save()
    model[0].running_mean.fill_(5.0)
    statistics.write_change(change)
    assert change.tolist() == [5.0] * 3 + [0.0] * 7
    statistics.apply_change(torch.full((10,), float("nan")), torch.tensor(False))
    assert torch.equal(model[0].running_mean, torch.zeros(3))
    statistics.apply_change(torch.arange(10.0), torch.tensor(True))
    assert model[1].running_var.tolist() == [9.0, 10.0]
    assert dict(model.named_buffers())["0.running_var"].tolist() == [4.0, 5.0, 6.0]


def test_running_statistics_follow_the_batch_in_bf16_messages() -> None:
    """A variance moves from 1 to 1.5, each change rounded to bf16. Rounded values would stop before."""
    layer = BatchNorm(1)
    statistics, change = RunningStatistics(layer), torch.empty(2)
    for _ in range(100):
        statistics.save()
        layer.running_var.lerp_(torch.tensor([1.5]), 0.1)
        statistics.write_change(change)
        statistics.apply_change(change.bfloat16().float(), torch.tensor(True))
    assert layer.running_var.item() == pytest.approx(1.5, rel=1e-4)
