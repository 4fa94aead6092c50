"""Loaders on the CPU: native has the batches of reference to the bit; images for a GPU are in pinned memory."""

import logging
import threading
from typing import Any

import numpy as np
import PIL
import pytest
import torch

from podscale.data import native
from podscale.data.decode import crop_and_resize
from podscale.data.loaders.base import Batch
from podscale.data.loaders.build_loader import build_evaluation_loader, open_shard_set, resolve_loader
from podscale.data.loaders.cpu import NativeLoader, PillowLoader, PinnedAllocator, image_allocator
from podscale.data.node_cache import ShardCache
from podscale.data.shard_set import ShardSet, Split
from tests.support.loading import (
    NATIVE,
    assert_same_batches,
    document,
    evaluate,
    needs_dali,
    needs_native,
    open_loader,
    train_and_close,
)
from tests.support.logs import logged
from tests.support.shard_set import Sample, encode_image, smooth_pixels, varied_samples
from tests.support.store import QUICK, serve

SECTIONS: dict[str, dict[str, Any]] = {
    "random crops": {},
    "bicubic": {"interpolation": "bicubic"},
    "filters at random": {"interpolation": "random"},
    "filters at random, some coefficients, augmented": {
        "interpolation": "random",
        "decoded_cache_bytes": 100_000,
        "decoded_cache_form": "coefficients",
        "augment": {"policy": "trivial_augment"},
    },
    "squares": {"crop": {"short_side": 0.7}},
    "padded": {"crop": {"padding": 5}},
    "augmented": {"augment": {"policy": "rand_augment", "erase": 0.3}},
    "repeated": {"repeats": 2},
    "cached": {"decoded_cache_bytes": 2**40},
    "some cached": {"decoded_cache_bytes": 100_000},
    "coefficients": {"decoded_cache_bytes": 2**40, "decoded_cache_form": "coefficients"},
    "some coefficients": {"decoded_cache_bytes": 100_000, "decoded_cache_form": "coefficients"},
    "coefficients, augmented": {
        "decoded_cache_bytes": 100_000,
        "decoded_cache_form": "coefficients",
        "augment": {"policy": "trivial_augment"},
    },
    "pixels": {"decoded_cache_bytes": 100_000, "decoded_cache_form": "pixels"},
    "cached and augmented": {"decoded_cache_bytes": 100_000, "augment": {"policy": "trivial_augment"}},
}


@needs_native
@pytest.mark.parametrize("section", SECTIONS)
def test_training_batches_are_those_of_the_reference(section, mixed) -> None:
    """Damaged records are counted and substituted in the same way, with any number of threads."""
    plain = {"max_bad_rate": 1.0, **SECTIONS[section]}
    usual = {name: value for name, value in plain.items() if name != "decoded_cache_form"}
    expected, reference = train_and_close(document(input=usual), mixed, 0, 18)
    for workers in (1, 3):
        found, loader = train_and_close(document("native", input={**plain, "workers": workers}), mixed, 0, 18)
        assert type(loader) is NativeLoader
        assert_same_batches(expected, found)
        assert loader.bad_records == reference.bad_records > 0
    assert type(reference) is PillowLoader
    assert reference.native_refusals == {}


@needs_native
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [32, 64])
def test_evaluation_batches_are_those_of_the_reference(size, interpolation, mixed) -> None:
    section = {"max_bad_rate": 1.0, "interpolation": interpolation}
    for world in (1, 2):
        assert_same_batches(
            *(
                evaluate(document(name, size=size, input=section), mixed, world=world)
                for name in ("reference", "native")
            )
        )


@pytest.mark.parametrize("loader", ["reference", NATIVE, pytest.param("dali", marks=needs_dali)])
def test_evaluation_is_bicubic_if_training_draws_filters(loader, make_shard_set) -> None:
    directory = make_shard_set()
    config = document(input={"interpolation": "random"})
    bicubic = evaluate(document(loader, input={"interpolation": "bicubic"}), directory)
    config = config.model_copy(update={"input": config.input.model_copy(update={"loader": loader})})
    assert_same_batches(bicubic, evaluate(config, directory))


@needs_native
def test_what_the_extension_refuses_is_counted_by_reason(make_shard_set) -> None:
    """An epoch has 24 usual JPEGs, 8 progressive ones, 4 PNGs, and 4 of another size than in the index."""
    usual = [encode_image(smooth_pixels(i, 40, 50)) for i in range(24)]
    progressive = [encode_image(smooth_pixels(i, 40, 50), progressive=True) for i in range(8)]
    pngs = [encode_image(smooth_pixels(i, 40, 50), kind="PNG") for i in range(4)]
    samples = [Sample(data, 0) for data in (*usual, *progressive, *pngs)]
    samples += [Sample(data, 0, (41, 50)) for data in usual[:4]]
    directory = make_shard_set({"train": samples, "validation": samples[:4]}, shards=1)
    section: dict[str, Any] = {"max_bad_rate": 1.0}
    _, loader = train_and_close(document("native", input=section), directory, 0, 5)
    refusals = loader.native_refusals
    assert (refusals["format"], refusals["data"]) == (12, 0)
    assert 1 <= refusals["size"] <= 4, "some may be substituted before they are decoded"
    section |= {"decoded_cache_bytes": 2**40, "decoded_cache_form": "pixels"}
    _, loader = train_and_close(document("native", input=section), directory, 0, 5)
    assert loader.native_refusals["format"] == 0, "what is kept is decoded by the reference path anyway"


@pytest.mark.parametrize("loader", [NATIVE, pytest.param("dali", marks=needs_dali)])
def test_a_remote_set_larger_than_its_cache(loader, make_shard_set, tmp_path) -> None:
    """A batch reads nearly all of the 12 shards, of which the cache holds 8; a shard in use cannot be evicted."""
    local = open_shard_set(str(make_shard_set(shards=12)), document())
    sizes = sorted(shard.bytes for shard in local.manifest.splits["train"].shards)
    with serve(tmp_path) as store:
        cache = ShardCache(tmp_path / "cache", sum(sizes[-8:]), QUICK)
        batches = []
        for name, shard_set in (("reference", local), (loader, cache.open(f"{store.url}/shards"))):
            with open_loader(document(name, batch=16), shard_set.split("train")) as opened:
                batches.append(list(opened.batches(0, 6)))
    if loader == "native":
        assert_same_batches(*batches)
    assert [batch.keys.tolist() for batch in batches[0]] == [batch.keys.tolist() for batch in batches[1]]


def test_without_the_extension_the_reference_takes_over(make_shard_set, monkeypatch, caplog) -> None:
    monkeypatch.setattr(native, "_native", None)
    assert resolve_loader("auto", "cpu") == "reference"
    assert not caplog.records
    assert resolve_loader("native", "cpu") == "reference"
    assert logged(caplog, module="build_loader") == [()]
    _, loader = train_and_close(document("native"), make_shard_set(), 0, 2)
    assert type(loader) is PillowLoader


@needs_native
def test_another_pillow_is_noticed(monkeypatch, caplog) -> None:
    def resize_otherwise(*arguments: Any) -> np.ndarray:
        return np.asarray(crop_and_resize(*arguments)) ^ 1

    monkeypatch.setattr(native, "crop_and_resize", resize_otherwise)
    native.pillow_order.cache_clear()
    assert resolve_loader("auto", "cpu") == "reference"
    assert resolve_loader("native", "cpu") == "reference"
    assert logged(caplog) == [(PIL.__version__,)], "reported once, by the decoder"
    monkeypatch.undo()
    native.pillow_order.cache_clear()
    assert resolve_loader("auto", "cpu") == "native"


def test_documents_may_name_the_reference_by_its_earlier_name() -> None:
    assert document("torchvision").input.loader == "reference"


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
