"""Train step on torch's `meta` device: fails on operations that would make the host wait for a GPU or copy to it.

Tensors on `meta` have shapes and no values. Every operation of a step is checked: none may read a value, none may mix
tensors of the host and of the device.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from podscale import models
from podscale.config import InputSection, ModelSection
from podscale.config.optimizer import OptimizerSection
from podscale.data.loaders.base import Batch
from podscale.pytorch.batch_norm.layer import RunningStatistics
from podscale.pytorch.device_prefetcher import DeviceBatch, Normalise
from podscale.pytorch.flat_buffers import FlatWeights
from podscale.pytorch.models import build_model
from podscale.pytorch.optim import build_optimizer, build_param_shard
from podscale.pytorch.precision import Precision
from podscale.pytorch.reducer import BucketedReducer
from podscale.pytorch.train_step import ForwardBackward, TrainingLoss, TrainStep, all_finite
from podscale.pytorch.world import World
from tests.support.tiny import SHALLOW

ASKS = {"aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.equal.default", "aten.nonzero.default"}
FAR = torch.device("meta")


class Watch(TorchDispatchMode):
    """Check that no operation reads a value from the device, or mixes its tensors with those of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = str(function)
        self.seen.add(name)
        found = function(*arguments, **(options or {}))
        tensors = [x for x in tree_leaves((arguments, options, found)) if isinstance(x, Tensor)]
        assert name not in ASKS, name
        assert len({x.device.type for x in tensors}) < 2, f"{name} between {[x.device.type for x in tensors]}"
        return found


class Alone:
    """All-reduce of one rank."""

    shards, shard = 1, 0

    def __call__(self, bucket: Tensor) -> None:
        bucket.mul_(1.0)


def step_on(rule: str, precision: str, model: ModelSection) -> Callable[[], None]:
    world = World(0, 1, 0, 1, FAR)
    network = build_model(model, 5).to(FAR, memory_format=torch.channels_last)
    statistics = RunningStatistics(network)
    policy = Precision(precision, FAR, 1024.0)
    reducer = BucketedReducer(network, Alone(), world, bucket_mb=0.01, extra=1 + len(statistics))
    weights = FlatWeights(reducer.buffer, cast=lambda: policy.cast_parameters(network))
    section = OptimizerSection.model_validate({"name": rule})
    share = build_param_shard(section, reducer.buffer, weights.masters, models.model_spec(model, 5))
    normalise = Normalise(InputSection(), world, channels_last=True)
    forward_backward = ForwardBackward(
        reducer,
        policy,
        statistics,
        TrainingLoss(0.1, 0.4),
        accumulation=2,
        forward=lambda images: network(normalise(images)),
    )
    optimizer = build_optimizer(section, share, 10.0)
    step = TrainStep(forward_backward, optimizer, weights, np.zeros((3, 3), np.float32))
    images = torch.empty(8, 64, 64, 3, dtype=torch.uint8, device=FAR)
    keys = np.zeros(8, np.uint64)
    labels = torch.empty(8, dtype=torch.int64, device=FAR)
    batch = DeviceBatch(images, labels, Batch(None, keys.astype(np.int64), keys, np.ones(8, np.float32), 0))
    return lambda: (step.run_on_device(batch, lambda name: nullcontext()), reducer.close())[1]


@pytest.fixture
def autocast(monkeypatch: Any) -> None:
    """Disable autocast, which torch does not have for `meta`; casts stay on the device in any case."""
    monkeypatch.setattr(Precision, "autocast", lambda self: nullcontext())


@pytest.mark.usefixtures("autocast")
@pytest.mark.parametrize("optimizer", ["sgd", "lars", "lamb", "nlcg", "neumann", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-pure"])
@SHALLOW
def test_a_step_reads_no_value_from_the_device(optimizer: str, precision: str) -> None:
    update = step_on(optimizer, precision, ModelSection(name="resnet18", width=4))
    with Watch() as watch:
        update()
    assert {"aten.convolution_backward.default", "aten.native_batch_norm_backward.default"} & watch.seen


@pytest.mark.usefixtures("autocast")
def test_a_step_of_alexnet_reads_no_value_from_the_device() -> None:
    update = step_on("lars", "fp32", ModelSection(name="alexnet", width=4))
    with Watch():
        update()


def test_the_check_detects_reads_and_copies() -> None:
    far = torch.zeros(3, device=FAR)
    with Watch():
        for wrong in (lambda: far.sum().item(), lambda: far + torch.ones(3).to(FAR), lambda: far.copy_(torch.ones(3))):
            with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
                wrong()
        far + 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("length", [1, 7, 64, 1000, 100_003])
def test_one_non_finite_element_anywhere_is_detected(bad: float, length: int) -> None:
    generator = np.random.default_rng(length)
    for index in {0, length - 1, *generator.integers(0, length, 10).tolist()}:
        values = torch.randn(length)
        assert all_finite([values, torch.zeros(3)])
        values[index] = bad
        assert not all_finite([torch.zeros(3), values])


def test_large_but_finite_values_are_finite() -> None:
    assert all_finite([torch.full((1000,), 3e38)])
