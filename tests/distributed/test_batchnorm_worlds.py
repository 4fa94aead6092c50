"""Group batch norm against plain batch norm over the group's whole batch, in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from podscale.pytorch.batchnorm import BatchNorm, span_groups
from podscale.pytorch.statistics import RunningStatistics
from podscale.pytorch.world import World

CHANNELS = 6


def images(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, CHANNELS, 5, 4, generator=generator) * (1 + rank) + 0.5 * rank


def toward(rank: int) -> Tensor:
    return torch.randn(3, CHANNELS, 5, 4, generator=torch.Generator().manual_seed(100 + rank))


def gamma_beta() -> tuple[Tensor, Tensor]:
    return torch.linspace(0.5, 2, CHANNELS), torch.linspace(-1, 1, CHANNELS)


def normalised(group: int) -> Any:
    def body(world: World) -> dict[str, Tensor]:
        layer = BatchNorm(CHANNELS, momentum=0.3)
        with torch.no_grad():
            for parameter, values in zip((layer.weight, layer.bias), gamma_beta(), strict=True):
                parameter.copy_(values)
        span_groups(nn.Sequential(layer), world, group)
        x = images(world.rank).requires_grad_()
        y = layer(x)
        (y * toward(world.rank)).sum().backward()
        layer.eval()
        return {
            "y": y.detach(),
            "dx": x.grad,
            "dw": layer.weight.grad,
            "db": layer.bias.grad,
            "mean": layer.running_mean,
            "var": layer.running_var,
            "eval": layer(images(7)).detach(),
        }

    return body


@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_group_normalises_as_one_batch(run_world: Any, group: int) -> None:
    found = run_world(4, normalised(group))
    for first in range(0, 4, group):
        ranks = range(first, first + group)
        layer = nn.BatchNorm2d(CHANNELS, momentum=0.3).double()
        with torch.no_grad():
            for parameter, values in zip((layer.weight, layer.bias), gamma_beta(), strict=True):
                parameter.copy_(values)
        x = torch.cat([images(rank) for rank in ranks]).double().requires_grad_()
        y = layer(x)
        (y * torch.cat([toward(rank) for rank in ranks])).sum().backward()
        layer.eval()

        def close(got: Tensor, want: Tensor) -> None:
            np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=2e-5, atol=2e-5)

        for name, want in (("y", y), ("dx", x.grad)):
            close(torch.cat([found[rank][name] for rank in ranks]), want)
        for name, want in (("dw", layer.weight.grad), ("db", layer.bias.grad)):  # local parts of the sum
            close(torch.stack([found[rank][name] for rank in ranks]).sum(0), want)
        for rank in ranks:
            close(found[rank]["mean"], layer.running_mean)
            close(found[rank]["var"], layer.running_var)
            close(found[rank]["eval"], layer(images(7).double()))


def half_precision(world: World) -> Tensor:
    layer = BatchNorm(CHANNELS)
    span_groups(nn.Sequential(layer), world, 2)
    return layer(images(world.rank).bfloat16())


def test_half_precision_goes_in_and_out(run_world: Any) -> None:
    full = run_world(2, normalised(2))
    for rank, y in enumerate(run_world(2, half_precision)):
        assert y.dtype == torch.bfloat16
        gamma, beta = gamma_beta()
        want = (full[rank]["y"] - beta.view(1, -1, 1, 1)) / gamma.view(1, -1, 1, 1)
        np.testing.assert_allclose(y.float().detach().numpy(), want.numpy(), atol=0.03)


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
