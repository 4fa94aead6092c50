"""Batch norm over groups of ranks and parts of batches, against plain batch norm of the same images in float64."""

import logging
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from podscale.config.spans import Span
from podscale.pytorch.batchnorm import BatchNorm, span_groups
from podscale.pytorch.statistics import RunningStatistics
from podscale.pytorch.world import World

MOMENTUM = 0.3


class Case(NamedTuple):
    """What is normalised: over whom, which images, in which dtype and memory order."""

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
    found = [
        Case(ranks, 4, channels, 4, uneven, dtype, last)
        for ranks, channels, uneven, dtype, last in product(
            groups, (1, 5, 64) if world < 8 else (5,), (False, True), (torch.float32, torch.float64), (False, True)
        )
        if not (uneven and ranks == 1)
    ]
    found += [Case(ranks, 4, 5, 4, False, torch.bfloat16, last) for ranks in groups for last in (False, True)]
    if world > 2:
        return found
    found += [
        Case(1, part, 5, 8, dtype=dtype, channels_last=last)
        for part, dtype, last in product((1, 2, 4, 8), (torch.float32, torch.float64), (False, True))
    ]
    return [*found, Case(1, 3, 5, 8), Case(1, 5, 5, 4), Case(1, 4, 5, 9, dtype=torch.bfloat16, channels_last=True)]


def normalise(world: World, case: Case) -> dict[str, Tensor]:
    layer = case.layer()
    span_groups(nn.Sequential(layer), world, Span(case.ranks, case.images))
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
    """One set of statistics: torch's batch norm in float64, over rows of the ranks' concatenated batches."""

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
    """A rest joins the last part; a batch below two parts is one."""
    parts = max(1, size // case.images)
    return [case.images] * (parts - 1) + [size - (parts - 1) * case.images]


def check(case: Case, ranks: range, found: list[dict[str, Tensor]]) -> None:
    """`found` of one group of ranks against one oracle, or of one rank against an oracle for each part."""
    x = torch.cat([case.draw(rank, 1) for rank in ranks])
    dy = torch.cat([case.draw(rank, 2) for rank in ranks])
    sizes = [len(x)] if case.ranks > 1 else split_sizes(case, len(x))
    oracles = [Oracle(case, *pieces) for pieces in zip(x.split(sizes), dy.split(sizes), strict=True)]
    layers = [oracle.layer for oracle in oracles]
    exact = {torch.float64: 1e-11, torch.float32: 3e-6, torch.bfloat16: 2e-2}[case.dtype]

    def close(name: str, got: Tensor, want: Tensor, tolerance: float = exact) -> None:
        want = want.detach()
        np.testing.assert_allclose(
            got.double().numpy(), want.numpy(), rtol=tolerance, atol=tolerance * float(want.abs().max()),
            err_msg=f"{name} {case}",
        )  # fmt: skip

    close("y", torch.cat([f["y"] for f in found]), torch.cat([o.y for o in oracles]))
    close("dx", torch.cat([f["dx"] for f in found]), torch.cat([o.dx for o in oracles]))
    local = 1e-11 if case.dtype == torch.float64 else 1e-5  # sums and statistics are fp32 whatever the images are
    for name in ("weight", "bias"):  # each rank has its part of the sum; the averaging of gradients adds them up
        want = torch.stack([getattr(layer, name).grad for layer in layers]).sum(0)
        close(name, torch.stack([f[name] for f in found]).sum(0), want, local)
    mean = torch.stack([layer.running_mean for layer in layers]).mean(0)
    var = torch.stack([layer.running_var for layer in layers]).mean(0)
    for f in found:
        close("mean", f["mean"], mean, local)
        close("var", f["var"], var, local)
        layers[0].running_mean.copy_(mean)
        layers[0].running_var.copy_(var)
        close("evaluated", f["evaluated"], layers[0].eval()(case.draw(7, 3).double()))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_who_shares_statistics_normalises_as_one_batch(run_world: Any, size: int) -> None:
    found = run_world(size, lambda world: [normalise(world, case) for case in cases(size)])
    for number, case in enumerate(cases(size)):
        for first in range(0, size, case.ranks):
            ranks = range(first, first + case.ranks)
            check(case, ranks, [found[rank][number] for rank in ranks])
            for rank in ranks:
                for name in ("mean", "var"):
                    assert torch.equal(found[rank][number][name], found[first][number][name]), (case, name)


def over_nodes(world: World) -> list[str]:
    """What is logged where nodes have two ranks and groups have 1, 2 and 4."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("podscale.pytorch.batchnorm.layer").addHandler(handler)
    for ranks in (1, 2, 4):
        span_groups(nn.Sequential(BatchNorm(3)), replace(world, local_size=2), Span(ranks, 4))
    return said


def test_groups_that_leave_their_node_are_told_of_once(run_world: Any) -> None:
    first, *others = run_world(4, over_nodes)
    assert [line.split(":")[0] for line in first] == ["batch-norm groups of 4 ranks reach over nodes of 2"]
    assert others == [[], [], []]


def test_running_statistics_settle_or_go_back() -> None:
    model = nn.Sequential(BatchNorm(3), BatchNorm(2))
    statistics = RunningStatistics(model)
    assert len(statistics) == 10
    statistics.remember()
    model[0].running_mean.fill_(5.0)
    statistics.settle(torch.full((10,), float("nan")), torch.tensor(False))
    assert torch.equal(model[0].running_mean, torch.zeros(3))
    statistics.settle(torch.arange(10.0), torch.tensor(True))
    assert model[1].running_var.tolist() == [8.0, 9.0]
    assert dict(model.named_buffers())["0.running_var"].tolist() == [3.0, 4.0, 5.0]
