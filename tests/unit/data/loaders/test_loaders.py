"""Promises of every loader: samples in order, pixels that do not depend on world size or restarts, no process left."""

import subprocess
import sys

import numpy as np
import pytest

from podscale.data.loaders.build_loader import is_dali_installed, resolve_loader
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from tests.support.loading import NATIVE, ON_CPU, by_key, document, evaluate, loaders, needs_dali, open_loader, train
from tests.support.polling import until
from tests.support.refusals import refused


@loaders
def test_batches_follow_the_order(loader, make_shard_set) -> None:
    directory = make_shard_set()
    config = document(loader)
    split = ShardSet.open(directory).split("train")
    order = build_sampler(config, split)
    batches = train(config, directory, 3, 9)
    assert [batch.step for batch in batches] == list(range(3, 9))
    for batch in batches:
        rows = order.global_batch(batch.step).rows
        assert np.array_equal(batch.keys, split.keys[rows])
        assert np.array_equal(batch.labels, split.labels[rows])
        assert batch.images.shape == (8, 32, 32, 3)
        assert (batch.images.dtype, batch.labels.dtype, batch.keys.dtype) == (np.uint8, np.int64, np.uint64)
        assert (batch.weights == 1).all()


@loaders
def test_pixels_depend_on_neither_world_size_nor_workers_nor_resumption(loader, make_shard_set) -> None:
    directory = make_shard_set()
    whole = by_key(train(document(loader), directory, 0, 12))
    resumed = train(document(loader), directory, 0, 5) + train(document(loader), directory, 5, 12)
    one_worker = document(loader, input={"workers": 1, "prefetch": 1})
    steps = [train(one_worker, directory, 0, 12, ranks=range(rank, rank + 1), world=4) for rank in range(4)]
    split_up = [batch for step in zip(*steps, strict=True) for batch in step]
    for other in (by_key(resumed), by_key(split_up)):
        assert other.keys() == whole.keys()
        assert all(np.array_equal(whole[key], other[key]) for key in whole)
    first, second = ([whole[key] for key in sorted(whole) if key[1] == epoch] for epoch in (0, 1))
    assert len(first) == len(second) == 48
    assert all(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_padded_crops_depend_on_neither_world_size_nor_resumption(make_shard_set) -> None:
    directory = make_shard_set()
    section = {"crop": {"padding": 4}, "interpolation": "bicubic"}
    config = document(input=section)
    whole = by_key(train(config, directory, 0, 12))
    resumed = train(config, directory, 0, 5) + train(config, directory, 5, 12)
    steps = [train(config, directory, 0, 12, ranks=range(rank, rank + 1), world=4) for rank in range(4)]
    for other in (by_key(resumed), by_key([batch for step in zip(*steps, strict=True) for batch in step])):
        assert other.keys() == whole.keys()
        assert all(np.array_equal(whole[key], other[key]) for key in whole)
    epochs = [[whole[key] for key in sorted(whole) if key[1] == epoch] for epoch in (0, 1)]
    same = sum(np.array_equal(first, second) for first, second in zip(*epochs, strict=True))
    assert same <= 4, "of 48; the other epoch draws other crops of 9 x 9 positions and mirrors"


def test_a_process_of_several_ranks_gets_their_parts_one_after_the_other(make_shard_set) -> None:
    directory = make_shard_set()
    blocked = document(input={"order": "blocked", "groups": 2}, launch={"nodes": 2})
    for config in (document(), blocked):
        each = [train(config, directory, 0, 4, ranks=range(rank, rank + 1), world=4) for rank in range(4)]
        both = train(config, directory, 0, 4, ranks=range(2, 4), world=4)
        for whole, third, fourth in zip(both, each[2], each[3], strict=True):
            assert whole.keys.tolist() == [*third.keys.tolist(), *fourth.keys.tolist()]
            assert np.array_equal(whole.images, np.concatenate([third.images, fourth.images]))


def test_crops_are_drawn_anew_by_seed_and_epoch(make_shard_set) -> None:
    """Images are compared by their keys, because the order also depends on the seed."""
    directory = make_shard_set()

    def epochs(seed: int) -> list[dict[int, np.ndarray]]:
        batches = train(document(run={"seed": seed}), directory, 0, 12)
        images = [
            (key, image) for batch in batches for key, image in zip(batch.keys.tolist(), batch.images, strict=True)
        ]
        return [dict(images[:48]), dict(images[48:])]

    def alike(left: dict[int, np.ndarray], right: dict[int, np.ndarray]) -> int:
        assert left.keys() == right.keys()
        return sum(np.array_equal(left[key], right[key]) for key in left)

    first, second = epochs(4)
    assert len(first) == len(second) == 48
    assert alike(first, epochs(4)[0]) == 48
    assert alike(first, epochs(5)[0]) <= 2
    assert alike(first, second) <= 2


@loaders
def test_evaluation_hands_over_every_sample_once(loader, make_shard_set) -> None:
    directory = make_shard_set()
    keys = ShardSet.open(directory).split("validation").keys
    for world, held in ((1, 1), (2, 1), (5, 1), (4, 2)):
        batches = evaluate(document(loader), directory, world=world, held=held)
        assert {len(batch) for batch in batches} == {6 * held}
        seen = np.concatenate([batch.keys[batch.weights == 1] for batch in batches])
        assert np.array_equal(np.sort(seen), keys)
        padding = np.concatenate([batch.images[batch.weights == 0] for batch in batches])
        assert not padding.any()


def test_synthetic_images_are_keyed_and_keep_the_order(make_shard_set) -> None:
    directory = make_shard_set()
    config = document("synthetic")
    batches, again = (train(config, directory, 0, 12) for _ in range(2))
    split = ShardSet.open(directory).split("train")
    order = build_sampler(config, split)
    labels: dict[int, int] = {}
    for batch, other in zip(batches, again, strict=True):
        assert np.array_equal(batch.keys, split.keys[order.global_batch(batch.step).rows])
        assert np.array_equal(batch.images, other.images)
        for key, label in zip(batch.keys.tolist(), batch.labels.tolist(), strict=True):
            assert labels.setdefault(key, label) == label
    assert set(labels.values()) == {0, 1, 2, 3}
    assert batches[0].images.shape == (8, 32, 32, 3)


def test_batches_are_prepared_ahead(make_shard_set) -> None:
    config = document(input={"prefetch": 3})
    split = ShardSet.open(make_shard_set()).split("train")
    requested: list[int] = []
    with open_loader(config, split) as loader:
        at = loader._batch_plan.request_at  # type: ignore[attr-defined]
        loader._batch_plan.request_at = lambda step: (requested.append(step), at(step))[1]  # type: ignore[attr-defined]
        batches = loader.batches(0, 12)
        next(batches)
        assert requested == [0, 1, 2, 3]
        until(lambda: loader.queued_batches == 3, 60)  # exported as train_data_queue_depth
        batches.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("loader", ["reference", NATIVE, pytest.param("dali", marks=needs_dali)])
def test_an_abandoned_loader_lets_the_interpreter_end_and_starts_no_process(loader, make_shard_set) -> None:
    """Images are decoded in threads of the rank: they neither outlive it nor delay its exit."""
    program = (
        "import os, sys\n"
        "from podscale.config.run_config import RunConfig\n"
        "from podscale.data import build_loader\n"
        "from podscale.data.sampler import build_sampler\n"
        "from podscale.training.schedules import image_phases\n"
        "from podscale.data.shard_set import ShardSet\n"
        f"config = RunConfig.model_validate({document(loader).model_dump()!r})\n"
        f"split = ShardSet.open({str(make_shard_set())!r}).split('train')\n"
        "order, phases = build_sampler(config, split), image_phases(config, len(split))\n"
        "loader = build_loader(config, split, order, phases=phases, ranks=range(1), world_size=1, device='cpu')\n"
        "batches = loader.batches(0, 10**6)\n"
        "next(batches)\n"
        "print('children:', open(f'/proc/self/task/{os.getpid()}/children').read())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "children:"


def test_auto_takes_dali_for_gpus_alone(monkeypatch) -> None:
    assert resolve_loader("auto", "cpu") == ON_CPU
    assert resolve_loader("auto", "cuda:1") == ("dali" if is_dali_installed() else ON_CPU)
    monkeypatch.setattr("podscale.data.loaders.build_loader.is_dali_installed", lambda: False)
    assert resolve_loader("auto", "cuda:1") == ON_CPU, "there is no such device here"
    monkeypatch.setattr("podscale.data.loaders.build_loader._is_nvjpeg_available", lambda device: device == "cuda:1")
    assert resolve_loader("auto", "cuda:1") == "nvjpeg"
    assert resolve_loader("synthetic", "cuda:1") == "synthetic"


def test_dali_where_it_is_not_installed(monkeypatch) -> None:
    monkeypatch.setattr("podscale.data.loaders.build_loader.is_dali_installed", lambda: False)
    with refused("podscale[gpu]", field="input.loader", got="dali"):
        resolve_loader("dali", "cpu")
