"""Memory of batches: pinned if they go to a GPU, with the same pixels; ordinary memory if nothing can be pinned."""

import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch

from podscale.data.loaders.base import Batch
from podscale.data.loaders.batch_memory import PinnedAllocator, image_allocator
from podscale.data.loaders.build_loader import build_evaluation_loader
from podscale.data.shard_set import ShardSet, Split
from tests.support.loading import NATIVE, document, open_loader

cpu_loaders = pytest.mark.parametrize("loader", ["reference", NATIVE])


class PinnedMemory:
    """Stand-in for `torch.empty` that notes pinned tensors, and the threads that ask for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: list[torch.Tensor] = []
        self.threads: set[int] = set()
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self)

    def __call__(self, *shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = self._empty(*shape, **options)
        if pin_memory:
            tensor.fill_(77)  # as memory that was used before
            self.tensors.append(tensor)
            self.threads.add(threading.get_ident())
        return tensor

    def owns(self, images: np.ndarray) -> bool:
        """Return whether the images begin where a pinned tensor begins, by which torch finds its memory."""
        return images.ctypes.data in {tensor.data_ptr() for tensor in self.tensors}


def training_batches(loader: str, split: Split, device: str) -> list[Batch]:
    with open_loader(document(loader, batch=8), split, device=device) as opened:
        return list(opened.batches(0, 9))


def evaluation_batches(loader: str, split: Split, device: str) -> list[Batch]:
    opened = build_evaluation_loader(document(loader), split, ranks=range(1), world_size=1, device=device)
    try:
        return list(opened.batches(0, 9))
    finally:
        opened.close()


@cpu_loaders
@pytest.mark.parametrize("read", [training_batches, evaluation_batches])
def test_batches_for_a_gpu_are_filled_in_pinned_memory(make_shard_set, monkeypatch, loader: str, read: Any) -> None:
    """49 samples, so that the last batch of the evaluation has padding, which must be zero."""
    from tests.support.shard_set import varied_samples

    split = ShardSet.open(make_shard_set({"train": varied_samples(49, 4), "validation": []})).split("train")
    wanted = read(loader, split, "cpu")
    memory = PinnedMemory(monkeypatch)
    batches = read(loader, split, "cuda:0")
    assert len(memory.tensors) == len(batches) == 9
    assert memory.threads == {threading.get_ident()}, "a graph may be recorded in this thread alone"
    for batch, other in zip(batches, wanted, strict=True):
        assert memory.owns(batch.images)
        assert not memory.owns(other.images)
        np.testing.assert_array_equal(batch.images, other.images)
        np.testing.assert_array_equal(batch.weights, other.weights)


def test_batches_for_a_cpu_never_touch_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PinnedMemory(monkeypatch)
    assert image_allocator("cpu")((2, 3, 3, 3)).shape == (2, 3, 3, 3)
    assert memory.tensors == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can pin memory")
@cpu_loaders
def test_without_cuda_the_memory_is_ordinary(make_shard_set, caplog, loader: str) -> None:
    """torch itself refuses here, once."""
    split = ShardSet.open(make_shard_set()).split("train")
    with caplog.at_level(logging.WARNING, "podscale.data"):
        batches = training_batches(loader, split, "cuda:0")
    for batch, other in zip(batches, training_batches(loader, split, "cpu"), strict=True):
        np.testing.assert_array_equal(batch.images, other.images)
    assert len([record for record in caplog.records if "not pinned" in record.message]) == 1


def test_memory_that_runs_out_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*shape: Any, **options: Any) -> torch.Tensor:
        asked.append(shape)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    allocate = PinnedAllocator()
    for _ in range(3):
        images = allocate((2, 4, 4, 3))
        assert (images.dtype, images.shape) == (np.uint8, (2, 4, 4, 3))
    assert len(asked) == 1
