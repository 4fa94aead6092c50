"""One step against what a single process computes in float64 for all ranks together."""

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


def one_update(world: World, running: Literal["mean", "first"] = "mean", norm_every: int = 1) -> dict[str, Any]:
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
    schedule = torch.tensor([[9.0, 0.9, 0.9], [RATE, 0.0, 0.0]])
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
    ranks = run_world(size, one_update)
    losses, statistics = [], []
    model = network().double()
    for rank in range(size):
        model[1].running_mean.zero_()
        model[1].running_var.fill_(1)
        given = batch(rank)
        for images, labels in zip(given.images.chunk(PARTS), given.labels.chunk(PARTS), strict=True):
            logits = model(images.double())
            loss = nn.functional.cross_entropy(logits, labels, label_smoothing=SMOOTHING) / (PARTS * size)
            loss.backward()
            losses.append(loss.detach())
        statistics.append(torch.stack([model[1].running_mean, model[1].running_var]).clone())
    mean, var = torch.stack(statistics).mean(0)
    want = {name: p.detach() - RATE * p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    want |= {"norm": torch.cat([gradient.flatten() for gradient in gradients]).norm()}
    want |= {"1.running_mean": mean, "1.running_var": var, "loss": torch.stack(losses).sum()}
    for found in ranks:
        assert found.pop("finite")
        assert found.keys() == want.keys()
        for name, value in want.items():
            np.testing.assert_allclose(found[name].numpy(), value.numpy(), rtol=2e-5, atol=2e-6, err_msg=name)


def test_the_norm_is_taken_now_and_then(run_world: Any) -> None:
    (found,) = run_world(1, lambda world: one_update(world, norm_every=2))
    assert found["norm"] is None


def test_running_statistics_of_the_first_rank_can_stand_for_all(run_world: Any) -> None:
    alone = run_world(1, one_update)[0]
    mean = run_world(2, one_update)[0]
    for found in run_world(2, lambda world: one_update(world, "first")):
        for name in ("1.running_mean", "1.running_var"):
            np.testing.assert_allclose(found[name].numpy(), alone[name].numpy(), rtol=1e-6)
            assert not np.allclose(found[name].numpy(), mean[name].numpy(), rtol=1e-2)
