"""PyTorch engine on one CUDA device: streams, pinned copies, half precision, resuming to the bit."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def untimed(name: str) -> Any:
    return nullcontext()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp16"])
@pytest.mark.parametrize(
    ("algorithm", "cuda_graph"), [("flat", False), ("torus2d", False), ("ddp", False), ("flat", True)]
)
def test_a_stopped_training_resumes_to_the_bit(
    make_shard_set: Any,
    document: Any,
    train_here: Any,
    tmp_path: Path,
    precision: str,
    algorithm: str,
    cuda_graph: bool,
) -> None:
    import torch

    from podscale.errors import Preempted

    if (algorithm, precision) == ("ddp", "bf16-pure"):
        pytest.skip("the ddp baseline does not support bf16 weights")
    shards = make_shard_set()
    states = []
    for name, stop in (("straight", None), ("halted", 5)):
        all_reduce = {"algorithm": algorithm, "bucket_mb": 0.1}
        config = document(tmp_path / name, precision=precision, all_reduce=all_reduce, cuda_graph=cuda_graph)
        if stop is not None:
            with pytest.raises(Preempted):
                train_here(config, shards, stop_at(stop))
        states.append(train_here(config, shards))
    assert states[0].keys() == states[1].keys()
    if algorithm != "ddp":  # its buckets change after the first step of a launch
        assert [n for n in states[0] if not torch.equal(states[0][n], states[1][n])] == []


def stop_at(step: int) -> Any:
    def watch(trainer: Any, number: int) -> None:
        trainer.stop_request.requested = number == step

    return watch


def test_gradients_equal_those_of_the_cpu(world: Any) -> None:
    import torch
    from torch import nn

    from podscale.pytorch.all_reduce import FlatAllReduce
    from podscale.pytorch.reducer import BucketedReducer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).double()
    images, labels = torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))
    nn.functional.cross_entropy(model(images.double()), labels).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    on_gpu = model.float().to(world.device, memory_format=torch.channels_last)
    for overlap in (True, False):
        reducer = BucketedReducer(on_gpu, FlatAllReduce(world), world, bucket_mb=0.002, overlap=overlap)
        for _ in range(3):
            reducer.start_step()
            loss = nn.functional.cross_entropy(on_gpu(images.to(world.device)), labels.to(world.device))
            reducer.backward(loss, last=True)
            reducer.finish()
        for gradient, expected_gradient in zip(reducer.buffer.views, expected, strict=True):
            torch.testing.assert_close(gradient.double().cpu(), expected_gradient, rtol=1e-4, atol=1e-6)
        reducer.close()


def test_the_prefetcher_copies_and_the_images_are_normalised(world: Any) -> None:
    import numpy as np

    from podscale.config import InputSection
    from podscale.data.loaders.base import Batch
    from podscale.pytorch.device_prefetcher import DevicePrefetcher, Normalise

    generator = np.random.default_rng(0)
    batches = [
        Batch(
            generator.integers(0, 256, (64, 32, 32, 3), dtype=np.uint8),
            np.arange(64),
            np.arange(64, dtype=np.uint64),
            np.ones(64, np.float32),
            step,
        )
        for step in range(20)
    ]
    section = InputSection()
    normalise = Normalise(section, world, channels_last=True)
    for item in DevicePrefetcher(world)(iter(batches), untimed):
        expected = (item.host_batch.images / 255.0 - section.mean) / section.std
        np.testing.assert_allclose(normalise(item.images).permute(0, 2, 3, 1).cpu().numpy(), expected, atol=1e-5)


def test_statuses_are_late_and_right(world: Any) -> None:
    import torch

    from podscale.distributed.step_status import STATUS_LAG
    from podscale.pytorch.step_sync import StepSync
    from podscale.pytorch.train_step import StepResult

    step_sync, received = StepSync(world), []
    for step in range(1, 50):
        loss = torch.full((), float(step), device=world.device)
        step_sync.send(
            step, StepResult(loss, torch.isfinite(loss) & (loss != 7)), busy_seconds=0.001 * step, stop=step == 9
        )
        received += step_sync.ready()
        assert len(received) == max(0, step - STATUS_LAG)
    received += step_sync.drain()
    assert [status.loss for status in received] == list(range(1, 50))
    assert [status.step for status in received if not status.is_finite] == [7]
    assert [status.step for status in received if status.stop_requested] == [9]
