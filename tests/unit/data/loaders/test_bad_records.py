"""Records that cannot be decoded: substituted in training, weight 0 in evaluation, an error if there are too many."""

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from podscale.data.decode import BadRecord
from podscale.data.loaders.cpu import CachingDecoder
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from podscale.errors import PodscaleError
from tests.support.jpeg_crops import as_record
from tests.support.loading import (
    add_indexes,
    assert_same_batches,
    by_key,
    document,
    evaluate,
    loaders,
    needs_native,
    open_loader,
    pil_pixels,
    train,
)
from tests.support.native_fuzz import declared_shape, seed_files
from tests.support.refusals import refused
from tests.support.shard_set import Sample, encode_image, smooth_pixels, varied_samples
from tests.support.unusual_jpegs import refused_images, usual_variants


def with_bad_records(bad: tuple[int, ...], count: int = 48) -> dict[str, list[Any]]:
    samples = [*varied_samples(count, 4)]
    for number, i in enumerate(bad):
        size = pil_pixels(samples[i].image).shape[:2]
        broken = [samples[i].image[:300], b"\0" * 200, samples[i].image[: len(samples[i].image) // 2]][number % 3]
        samples[i] = Sample(broken, samples[i].label, size)
    return {"train": samples, "validation": samples}


@loaders
def test_bad_records_are_counted_substituted_and_logged_once(loader, make_shard_set, caplog) -> None:
    directory = make_shard_set(with_bad_records((5, 6, 23)), shards=2)
    config = document(loader)
    split = ShardSet.open(directory).split("train")
    order = build_sampler(config, split)
    expected = {5: 7, 6: 7, 23: 0}  # the next good one of the same shard, around its end
    with caplog.at_level(logging.WARNING, "podscale.data"), open_loader(config, split) as reader:
        batches = list(reader.batches(0, 12))
    assert reader.bad_records == 6
    assert len(caplog.records) == 3
    rows = np.concatenate([order.global_batch(step).rows for step in range(12)])
    used = [expected.get(row, row) for row in rows.tolist()]
    assert np.array_equal(np.concatenate([batch.keys for batch in batches]), split.keys[used])
    assert np.array_equal(np.concatenate([batch.labels for batch in batches]), split.labels[used])
    clean = by_key(train(config, directory, 0, 12, ranks=range(1), world=1))
    again = by_key([batch for start in (0, 6) for batch in train(config, directory, start, start + 6)])
    assert all(np.array_equal(clean[key], again[key]) for key in clean)


@loaders
def test_a_substitute_is_augmented_as_at_its_own_index(loader, make_shard_set) -> None:
    """A sample has one crop per epoch, whether it was planned or is the substitute of another."""
    directory = make_shard_set(with_bad_records((5, 6, 23)), shards=2)
    interpolation = "bilinear" if loader in ("dali", "nvjpeg") else "random"
    batches = train(document(loader, input={"interpolation": interpolation}), directory, 0, 6)
    keys = np.concatenate([batch.keys for batch in batches]).tolist()
    images = np.concatenate([np.asarray(batch.images) for batch in batches])
    repeated = {key for key in keys if keys.count(key) > 1}
    assert len(repeated) == 2
    for key in repeated:
        first, *others = [images[slot] for slot, other in enumerate(keys) if other == key]
        assert all(np.array_equal(first, image) for image in others)


@loaders
def test_a_substitute_is_cut_as_its_phase_says(loader, make_shard_set) -> None:
    """In a later phase, the substitute of a bad record gets that phase's crop."""
    samples = [*varied_samples(24, 3)]
    samples[5] = replace(samples[5], image=b"no image", size=(40, 40))
    directory = make_shard_set({"train": samples, "validation": varied_samples(4, 3)}, shards=1)
    crop = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": 0.0}
    phases = {"phases": [{"start": 1, "crop": crop}], "epochs": 2}
    config = document(loader, train={"global_batch": 8, **phases}, input={"max_bad_rate": 1.0})
    bare = document(loader, input={"max_bad_rate": 1.0, "crop": crop})
    for mine, theirs in zip(train(config, directory, 3, 6), train(bare, directory, 3, 6), strict=True):
        assert np.array_equal(mine.keys, theirs.keys)
        assert np.array_equal(np.asarray(mine.images), np.asarray(theirs.images))


@loaders
def test_bad_records_weigh_nothing_in_evaluation(loader, make_shard_set) -> None:
    directory = make_shard_set(with_bad_records((5, 23)), shards=2)
    keys = ShardSet.open(directory).split("validation").keys
    batches = evaluate(document(loader), directory)
    seen = np.concatenate([batch.keys[batch.weights == 1] for batch in batches])
    assert np.array_equal(np.sort(seen), np.delete(keys, [5, 23]))


@loaders
def test_too_many_bad_records_end_the_run(loader, make_shard_set) -> None:
    directory = make_shard_set(with_bad_records(tuple(range(0, 48, 4))), shards=1)
    with refused(field="input.max_bad_rate", got=0.001, kind=PodscaleError):
        train(document(loader), directory, 0, 12)
    strict = document(loader, input={"max_bad_rate": 0})
    with refused(field="input.max_bad_rate", got=0, kind=PodscaleError) as refusal:
        train(strict, make_shard_set(with_bad_records((5, 11)), shards=1, name="two"), 0, 12)
    assert re.match(r"[12] of (8|16|24) records", refusal.error.problem)


@loaders
def test_a_shard_without_a_good_record_is_an_error_not_a_loop(loader, make_shard_set) -> None:
    directory = make_shard_set(with_bad_records(tuple(range(4)), count=4), shards=1)
    with refused("--inspect", kind=PodscaleError) as refusal:
        train(document(loader, batch=4), directory, 0, 2)
    assert refusal.error.field in ShardSet.open(directory).split("train").shard_names


@needs_native
@pytest.mark.parametrize("indexed", [False, True], ids=["", "with decode indexes"])
def test_every_damaged_seed_has_the_decision_of_the_reference_path(indexed, make_shard_set) -> None:
    """Damaged files, two images in one file, tables of zeros: both loaders have the same bad records and pixels."""
    files = [*seed_files(), *(data for data, _ in refused_images().values()), *usual_variants().values()]
    shapes = [declared_shape(as_record(file)) or (50, 60) for file in files]
    samples = [Sample(file, 0, shape) for file, shape in zip(files, shapes, strict=True)]
    directory = make_shard_set({"train": samples, "validation": samples}, shards=1)
    assert not indexed or add_indexes(directory) > 50
    found = {}
    for loader in ("reference", "native"):
        config = document(loader, input={"max_bad_rate": 1.0})
        with open_loader(config, ShardSet.open(directory).split("train")) as reader:
            found[loader] = [*reader.batches(0, 2 * len(files) // 8), *evaluate(config, directory)]
            found[loader, "bad"] = reader.bad_records
    assert_same_batches(found["reference"], found["native"])
    assert found["reference", "bad"] == found["native", "bad"]
    assert 20 < found["native", "bad"] < len(files), "some seeds are good, and some are bad"


def test_an_image_of_another_size_than_the_index_says_is_bad(make_shard_set) -> None:
    samples = [Sample(encode_image(smooth_pixels(1, 30, 30)), 0, (31, 30))]
    images = CachingDecoder(ShardSet.open(make_shard_set({"train": samples}, shards=1)).split("train"))
    with pytest.raises(BadRecord, match="30x30"):
        images(0)
