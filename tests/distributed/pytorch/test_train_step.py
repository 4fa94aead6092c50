"""One step on several ranks equals a single process in float64 on all their images."""

import copy
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from podscale.config.model import BatchNormSection
from podscale.data.loaders.base import Batch
from podscale.pytorch.all_reduce import FlatAllReduce
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.batch_norm.layer import RunningStatistics, running_statistics_weight
from podscale.pytorch.device_prefetcher import DeviceBatch
from podscale.pytorch.flat_buffers import FlatWeights
from podscale.pytorch.optim import ParamShard, ParamSlice, Sgd
from podscale.pytorch.precision import Precision
from podscale.pytorch.reducer import BucketedReducer
from podscale.pytorch.train_step import ForwardBackward, TrainingLoss, TrainStep
from podscale.pytorch.world import World

RATE, SMOOTHING, PARTS = 0.3, 0.1, 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), BatchNorm(6, momentum=0.4), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))


def batch(rank: int) -> DeviceBatch:
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(8, 3, 6, 6, generator=generator) + rank
    labels = torch.randint(0, 4, (8,), generator=generator)
    nothing = np.zeros(8, np.uint64)
    return DeviceBatch(images, labels, Batch(None, labels.numpy(), nothing, np.ones(8, np.float32), 0))


def one_step(world: World, running: Literal["mean", "first"] = "mean", norm_every: int = 1) -> dict[str, Any]:
    model = network()
    statistics = RunningStatistics(model, weight=running_statistics_weight(BatchNormSection(running=running), world))
    reducer = BucketedReducer(model, FlatAllReduce(world), world, extra=1 + len(statistics), bucket_mb=0.001)
    weights = FlatWeights(reducer.buffer)
    segments = [
        ParamSlice(n, start, p.numel(), True, True)
        for (n, p), start in zip(model.named_parameters(), reducer.buffer.offsets.values(), strict=True)
    ]
    optimizer = Sgd(
        ParamShard(segments, reducer.buffer.local_ranges, weights.masters, reducer.buffer.flat), nesterov=False
    )
    precision = Precision("fp32", world.device)
    schedule = np.array([[9.0, 0.9, 0.9], [RATE, 0.0, 0.0]], np.float32)
    forward_backward = ForwardBackward(reducer, precision, statistics, TrainingLoss(SMOOTHING), accumulation=PARTS)
    step = TrainStep(forward_backward, optimizer, weights, schedule, norm_every=norm_every)
    step.seek(1)
    result = step(batch(world.rank), lambda name: nullcontext())
    reducer.close()
    return {
        **copy.deepcopy(dict(model.state_dict())),
        "loss": result.loss,
        "finite": result.finite,
        "norm": result.grad_norm,
    }


@pytest.mark.parametrize("size", [1, 3])
def test_weights_loss_and_running_statistics_are_the_averages(run_world: Any, size: int) -> None:
    ranks = run_world(size, one_step)
    losses, statistics = [], []
    model = network().double()
    for rank in range(size):
        model[1].running_mean.zero_()
        model[1].running_var.fill_(1)
        images_and_labels = batch(rank)
        for images, labels in zip(
            images_and_labels.images.chunk(PARTS), images_and_labels.labels.chunk(PARTS), strict=True
        ):
            logits = model(images.double())
            loss = nn.functional.cross_entropy(logits, labels, label_smoothing=SMOOTHING) / (PARTS * size)
            loss.backward()
            losses.append(loss.detach())
        statistics.append(torch.stack([model[1].running_mean, model[1].running_var]).clone())
    mean, var = torch.stack(statistics).mean(0)
    expected = {name: p.detach() - RATE * p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    expected |= {"norm": torch.cat([gradient.flatten() for gradient in gradients]).norm()}
    expected |= {"1.running_mean": mean, "1.running_var": var, "loss": torch.stack(losses).sum()}
    for result in ranks:
        assert result.pop("finite")
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(result[name].numpy(), value.numpy(), rtol=2e-5, atol=2e-6, err_msg=name)


def test_the_norm_is_computed_every_norm_every_steps(run_world: Any) -> None:
    (result,) = run_world(1, lambda world: one_step(world, norm_every=2))
    assert result["norm"] is None


def test_running_first_keeps_the_statistics_of_the_first_rank(run_world: Any) -> None:
    alone = run_world(1, one_step)[0]
    mean = run_world(2, one_step)[0]
    for result in run_world(2, lambda world: one_step(world, "first")):
        for name in ("1.running_mean", "1.running_var"):
            np.testing.assert_allclose(result[name].numpy(), alone[name].numpy(), rtol=1e-6)
            assert not np.allclose(result[name].numpy(), mean[name].numpy(), rtol=1e-2)
