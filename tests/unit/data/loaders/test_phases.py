"""Crops that change at a phase of the run, in the middle of an epoch."""

import numpy as np
import pytest

from tests.support.loading import document, loaders, train

PHASED = {"phases": [{"start": 1.3, "crop": {"short_side": 0.75, "flip": 0.0}}], "epochs": 4}


@pytest.mark.parametrize("order", [{}, {"order": "blocked", "groups": 2}])
@loaders
def test_a_phase_brings_its_crop_in_the_middle_of_an_epoch(loader, order, make_shard_set) -> None:
    """Of 48 images in batches of 8, epoch 1.3 is step 7.8: steps 0 to 7 have the old crop, from 8 on the new one."""
    directory = make_shard_set()
    plain = document(loader, input=order)
    phased = document(loader, input=order, train={"global_batch": 8, **PHASED})
    everywhere = document(loader, input={**order, "crop": PHASED["phases"][0]["crop"]})
    before, after = train(plain, directory, 0, 8), train(everywhere, directory, 8, 14)
    got = train(phased, directory, 0, 14)
    for mine, theirs in zip(got, [*before, *after], strict=True):
        assert np.array_equal(mine.keys, theirs.keys), "a phase does not touch the order"
        assert np.array_equal(np.asarray(mine.images), np.asarray(theirs.images))
    old = train(plain, directory, 8, 9)[0]
    assert not np.array_equal(np.asarray(got[8].images), np.asarray(old.images))


@loaders
def test_a_run_that_is_resumed_inside_a_phase_sees_the_same_pixels(loader, make_shard_set) -> None:
    directory = make_shard_set()
    config = document(loader, train={"global_batch": 8, **PHASED})
    whole = train(config, directory, 0, 12)
    for start in (7, 8, 10):
        for mine, theirs in zip(train(config, directory, start, 12), whole[start:], strict=True):
            assert np.array_equal(np.asarray(mine.images), np.asarray(theirs.images))
    halves = [train(config, directory, 6, 12, ranks=range(rank, rank + 1), world=2) for rank in range(2)]
    for step in range(6):
        for rank in range(2):
            part = np.asarray(whole[6 + step].images)[rank::2]
            assert np.array_equal(np.asarray(halves[rank][step].images), part)


def test_the_synthetic_loader_goes_through_phases(make_shard_set) -> None:
    """It draws no crops, but keeps the order and the labels across the boundary."""
    directory = make_shard_set()
    plain, phased = (document("synthetic", train={"global_batch": 8, **extra}) for extra in ({}, PHASED))
    for mine, theirs in zip(train(phased, directory, 6, 12), train(plain, directory, 6, 12), strict=True):
        assert np.array_equal(mine.keys, theirs.keys)
        assert np.array_equal(mine.labels, theirs.labels)


RESIZED = {"phases": [{"start": 1.3, "image_size": 48}, {"start": 2.0, "crop": {"flip": 0.0}}], "epochs": 4}


@loaders
def test_a_phase_brings_its_size_in_the_middle_of_an_epoch(loader, make_shard_set) -> None:
    """Steps 0 to 7 equal those of a run at 32 px, from 8 on those of a run at 48; the next phase keeps the size."""
    directory = make_shard_set()
    resized = document(loader, train={"global_batch": 8, **RESIZED})
    crop = {"train": {"global_batch": 8, "phases": RESIZED["phases"][1:], "epochs": 4}}
    before = train(document(loader, size=32, **crop), directory, 0, 8)
    after = train(document(loader, size=48, **crop), directory, 8, 14)
    got = train(resized, directory, 0, 14)
    assert [batch.images.shape[1:3] for batch in got] == 8 * [(32, 32)] + 6 * [(48, 48)]
    for mine, theirs in zip(got, [*before, *after], strict=True):
        assert np.array_equal(mine.keys, theirs.keys)
        assert np.array_equal(np.asarray(mine.images), np.asarray(theirs.images))


@loaders
def test_sizes_change_at_the_same_sample_on_all_ranks_and_after_a_resume(loader, make_shard_set) -> None:
    directory = make_shard_set()
    config = document(loader, train={"global_batch": 8, **RESIZED})
    whole = train(config, directory, 6, 12)
    for start in (7, 8, 9):
        for mine, theirs in zip(train(config, directory, start, 12), whole[start - 6 :], strict=True):
            assert np.array_equal(np.asarray(mine.images), np.asarray(theirs.images))
    for rank in range(2):
        part = train(config, directory, 6, 12, ranks=range(rank, rank + 1), world=2)
        for mine, theirs in zip(part, whole, strict=True):
            assert np.array_equal(np.asarray(mine.images), np.asarray(theirs.images)[rank::2])


def test_the_synthetic_loader_changes_its_size(make_shard_set) -> None:
    config = document("synthetic", train={"global_batch": 8, **RESIZED})
    assert [batch.images.shape[1] for batch in train(config, make_shard_set(), 6, 10)] == [32, 32, 48, 48]


GROWN = {"phases": [{"start": 1, "global_batch": 24}, {"start": 2.3, "global_batch": 4}], "epochs": 4}


@pytest.mark.parametrize("order", [{}, {"order": "blocked", "groups": 2}])
@loaders
def test_a_phase_brings_its_batch_with_the_pixels_of_the_stream(loader, order, make_shard_set) -> None:
    """48 images: six steps of 8, three of 24 (epoch 2.3 is inside of the third), and 4 from then on."""
    directory = make_shard_set()
    config = document(loader, input=order, train={"global_batch": 8, **GROWN})
    got = train(config, directory, 0, 15)
    assert [len(batch) for batch in got] == 6 * [8] + 3 * [24] + 6 * [4]
    small = train(document(loader, input=order, train={"global_batch": 4, "epochs": 4}), directory, 0, 36)
    pixels = {
        (s.step * 4 // 48, int(key)): image
        for s in small
        for key, image in zip(s.keys, np.asarray(s.images), strict=True)
    }
    seen = 0
    for batch in got:
        for number, (key, image) in enumerate(zip(batch.keys, np.asarray(batch.images), strict=True)):
            epoch = seen // 48 if order else (seen + number) // 48
            assert np.array_equal(image, pixels[epoch, int(key)])
        seen += len(batch)
    for start in (5, 6, 8, 9):
        for mine, theirs in zip(train(config, directory, start, 12), got[start:12], strict=True):
            assert np.array_equal(mine.keys, theirs.keys)
            assert np.array_equal(np.asarray(mine.images), np.asarray(theirs.images))


def test_the_synthetic_loader_changes_its_batch(make_shard_set) -> None:
    config = document("synthetic", train={"global_batch": 8, **GROWN})
    assert [batch.images.shape[0] for batch in train(config, make_shard_set(), 4, 10)] == [8, 8, 24, 24, 24, 4]
