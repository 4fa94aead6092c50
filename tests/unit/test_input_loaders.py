"""Loaders against each other, against torchvision itself, and against broken records."""

import io
import logging
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from podscale.config import load
from podscale.config.model import RunConfig
from podscale.errors import InputError, PodscaleError
from podscale.input import build_evaluation_loader, build_loader, resolve_loader
from podscale.input.build import dali_installed
from podscale.input.decode import BadRecord, decode
from podscale.input.loaders.torchvision import ShardDataset
from podscale.order import build_order, evaluation_steps
from podscale.shards.build import build_shard_set
from podscale.shards.shardset import ShardSet
from tests.support.shard_set import Sample, encode_image, smooth_pixels, varied_samples

needs_dali = pytest.mark.skipif(not dali_installed(), reason="DALI is not installed (Linux x86-64 only)")
loaders = pytest.mark.parametrize("loader", ["torchvision", pytest.param("dali", marks=needs_dali), "nvjpeg"])


def document(loader: str = "torchvision", batch: int = 8, size: int = 32, **sections: Any) -> RunConfig:
    sections.setdefault("input", {})
    sections["input"] = {"loader": loader, "image_size": size, "workers": 2, **sections["input"]}
    return RunConfig.model_validate(
        {"train": {"global_batch": batch}, "evaluate": {"batch": 6}, "run": {"seed": 4}, **sections}
    )


def train(config: RunConfig, directory: Path, start: int, stop: int, *, rank: int = 0, world: int = 1) -> list[Any]:
    split = ShardSet.open(directory).split("train")
    loader = build_loader(config, split, build_order(config, split), rank=rank, world=world, device="cpu")
    try:
        return list(loader.batches(start, stop))
    finally:
        loader.close()
        loader.close()


def evaluate(config: RunConfig, directory: Path, *, world: int = 1) -> list[Any]:
    split = ShardSet.open(directory).split("validation")
    batches = []
    for rank in range(world):
        loader = build_evaluation_loader(config, split, rank=rank, world=world, device="cpu")
        batches += loader.batches(0, evaluation_steps(len(split), world, config.evaluate.batch))
        loader.close()
    return batches


def by_key(batches: list[Any]) -> dict[tuple[int, int], np.ndarray]:
    """(key, how often it came before in these batches) -> image."""
    found: dict[tuple[int, int], np.ndarray] = {}
    for batch in batches:
        for key, weight, image in zip(batch.keys.tolist(), batch.weights, batch.images, strict=True):
            if weight:
                found[key, sum(k == key for k, _ in found)] = np.asarray(image)
    return found


@loaders
def test_batches_follow_the_order(loader, make_shard_set) -> None:
    directory = make_shard_set()
    config = document(loader)
    split = ShardSet.open(directory).split("train")
    order = build_order(config, split)
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
    steps = [train(one_worker, directory, 0, 12, rank=rank, world=4) for rank in range(4)]
    split_up = [batch for step in zip(*steps, strict=True) for batch in step]
    for other in (by_key(resumed), by_key(split_up)):
        assert other.keys() == whole.keys()
        assert all(np.array_equal(whole[key], other[key]) for key in whole)
    first, second = ([whole[key] for key in sorted(whole) if key[1] == epoch] for epoch in (0, 1))
    assert len(first) == len(second) == 48
    assert all(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@needs_dali
def test_dali_and_torchvision_give_the_same_samples_and_nearly_the_same_pixels(make_shard_set) -> None:
    directory = make_shard_set()
    reference, other = (train(document(name), directory, 0, 6) for name in ("torchvision", "dali"))
    for left, right in zip(reference, other, strict=True):
        assert np.array_equal(left.keys, right.keys)
        difference = np.abs(left.images.astype(int) - right.images)
        assert difference.mean() < 0.6
        assert difference.max() <= 4


def test_decoding_in_batches_gives_the_same_samples_and_nearly_the_same_pixels(make_shard_set) -> None:
    """What nvJPEG's loader does, with torchvision's decoder on the CPU: PNG and CMYK among the JPEGs."""
    samples = [Sample(data, 0) for name, data in special_images().items() if name != "one pixel"]
    directory = make_shard_set({"train": samples, "validation": samples}, shards=1)
    for size in (32, 64):
        config, other = (document(name, batch=6, size=size) for name in ("torchvision", "nvjpeg"))
        for read in (lambda c: train(c, directory, 0, 6), lambda c: evaluate(c, directory)):
            for left, right in zip(read(config), read(other), strict=True):
                assert np.array_equal(left.keys, right.keys)
                assert np.array_equal(left.weights, right.weights)
                difference = np.abs(left.images.astype(int) - right.images)
                assert difference.mean() < 0.6
                assert difference.max() <= 4


@needs_dali
@pytest.mark.parametrize("size", [32, 64])
def test_evaluation_is_alike_in_both_loaders(size, make_shard_set) -> None:
    directory = make_shard_set()
    reference, other = (evaluate(document(name, size=size), directory, world=2) for name in ("torchvision", "dali"))
    for left, right in zip(reference, other, strict=True):
        assert np.array_equal(left.keys, right.keys)
        assert np.array_equal(left.weights, right.weights)
        difference = np.abs(left.images.astype(int) - right.images)
        assert difference.mean() < 0.6
        assert difference.max() <= 4


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """The embedded digits as their preset has them: PNG images of 8 x 8 pixels, enlarged to 16."""
    preset = Path(__file__).parents[2] / "pipelines" / "runs" / "digits.yaml"
    directory = tmp_path_factory.mktemp("digits") / "set"
    config = load(preset)
    build_shard_set(config.data, directory, workers=1)
    return config, directory


@needs_dali
def test_digits_are_alike_in_both_loaders(digits: tuple[RunConfig, Path]) -> None:
    config, directory = digits
    configs = [load_variant(config, name) for name in ("torchvision", "dali")]
    per_epoch = 1438 // config.train.global_batch
    for read in (
        lambda c: train(c, directory, per_epoch - 2, per_epoch + 2, world=2),
        lambda c: evaluate(c, directory),
    ):
        reference, other = map(read, configs)
        for left, right in zip(reference, other, strict=True):
            assert left.step == right.step
            assert np.array_equal(left.keys, right.keys)
            assert np.array_equal(left.labels, right.labels)
            difference = np.abs(left.images.astype(int) - right.images)
            assert left.images.shape[1:] == (16, 16, 3)
            assert left.images.std() > 40, "the digits are seen"
            assert difference.mean() < 0.6
            assert difference.max() <= 4


def load_variant(config: RunConfig, loader: str) -> RunConfig:
    """The same document with another loader."""
    return config.model_copy(update={"input": config.input.model_copy(update={"loader": loader})})


@loaders
def test_evaluation_hands_over_every_sample_once(loader, make_shard_set) -> None:
    directory = make_shard_set()
    keys = ShardSet.open(directory).split("validation").keys
    for world in (1, 2, 5):
        batches = evaluate(document(loader), directory, world=world)
        assert {len(batch) for batch in batches} == {6}
        seen = np.concatenate([batch.keys[batch.weights == 1] for batch in batches])
        assert np.array_equal(np.sort(seen), keys)
        padding = np.concatenate([batch.images[batch.weights == 0] for batch in batches])
        assert not padding.any()


def test_training_and_evaluation_pixels_are_torchvisions(make_shard_set) -> None:
    """An oracle written with torchvision's own transforms on PIL images."""
    functional = pytest.importorskip("torchvision.transforms.functional")
    directory = make_shard_set()
    config = document(size=40)
    split = ShardSet.open(directory).split("validation")
    pixels = by_key(evaluate(config, directory))
    for row in range(len(split)):
        image = Image.open(io.BytesIO(split.record(row).tobytes())).convert("RGB")
        resized = functional.resize(image, round(40 / 0.875))
        expected = np.asarray(functional.center_crop(resized, [40, 40]))
        assert np.array_equal(pixels[int(split.keys[row]), 0], expected)

    from podscale.input.crop import training_views

    split = ShardSet.open(directory).split("train")
    order = build_order(config, split)
    (batch,) = train(config, directory, 7, 8)
    slots = order.global_batch(7)
    sizes = [split.column(name)[slots.rows].astype(np.int64) for name in ("width", "height")]
    views = training_views(4, slots.epochs, batch.keys, *sizes, crop=config.input.crop, size=40)
    for slot, row in enumerate(slots.rows.tolist()):
        image = Image.open(io.BytesIO(split.record(row).tobytes())).convert("RGB")
        view = views[slot]
        expected = functional.resized_crop(image, view.top, view.left, view.height, view.width, [40, 40])
        expected = functional.hflip(expected) if view.flip else expected
        assert np.array_equal(batch.images[slot], np.asarray(expected))


PHASED = {"phases": [{"start": 1.3, "crop": {"short_side": 0.75, "flip": 0.0}}], "epochs": 4}


@pytest.mark.parametrize("order", [{}, {"order": "blocked", "groups": 2}])
@loaders
def test_a_phase_brings_its_crop_in_the_middle_of_an_epoch(loader, order, make_shard_set) -> None:
    """Of 48 images in batches of 8, epoch 1.3 is update 7.8: updates 0 to 7 are as ever, from 8 on the crop is new."""
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
    halves = [train(config, directory, 6, 12, rank=rank, world=2) for rank in range(2)]
    for step in range(6):
        for rank in range(2):
            part = np.asarray(whole[6 + step].images)[rank::2]
            assert np.array_equal(np.asarray(halves[rank][step].images), part)


def test_the_synthetic_loader_goes_through_phases(make_shard_set) -> None:
    """It draws no crops, but it follows the order and the labels through the boundary."""
    directory = make_shard_set()
    plain, phased = (document("synthetic", train={"global_batch": 8, **extra}) for extra in ({}, PHASED))
    for mine, theirs in zip(train(phased, directory, 6, 12), train(plain, directory, 6, 12), strict=True):
        assert np.array_equal(mine.keys, theirs.keys)
        assert np.array_equal(mine.labels, theirs.labels)


@loaders
def test_a_substitute_is_cut_as_its_phase_says(loader, make_shard_set) -> None:
    """A record that cannot be decoded is replaced in a later phase by the neighbour in that phase's crop."""
    samples = varied_samples(24, 3)
    samples[5] = replace(samples[5], image=b"no image", size=(40, 40))
    directory = make_shard_set({"train": samples, "validation": varied_samples(4, 3)}, shards=1)
    crop = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": 0.0}
    phases = {"phases": [{"start": 1, "crop": crop}], "epochs": 2}
    config = document(loader, train={"global_batch": 8, **phases}, input={"max_bad_rate": 1.0})
    bare = document(loader, input={"max_bad_rate": 1.0, "crop": crop})
    for mine, theirs in zip(train(config, directory, 3, 6), train(bare, directory, 3, 6), strict=True):
        assert np.array_equal(mine.keys, theirs.keys)
        assert np.array_equal(np.asarray(mine.images), np.asarray(theirs.images))


def special_images() -> dict[str, bytes]:
    rgb = smooth_pixels(1, 50, 60)
    exif = Image.Exif()
    exif[0x0112] = 6
    palette = io.BytesIO()
    Image.fromarray(rgb).quantize(64).save(palette, "PNG")
    return {
        "4:4:4": encode_image(rgb, quality=95, subsampling=0),
        "4:2:2": encode_image(rgb, quality=95, subsampling=1),
        "4:2:0": encode_image(rgb, quality=75, subsampling=2),
        "progressive": encode_image(rgb, progressive=True),
        "gray": encode_image(smooth_pixels(2, 40, 33, 1)),
        "cmyk": encode_image(smooth_pixels(3, 40, 50, 4)),
        "rotated by EXIF": encode_image(rgb, exif=exif),
        "png": encode_image(rgb, kind="PNG"),
        "gray png": encode_image(smooth_pixels(2, 40, 33, 1), kind="PNG"),
        "rgba png": encode_image(smooth_pixels(5, 40, 33, 4), kind="PNG"),
        "palette png": palette.getvalue(),
        "odd size": encode_image(smooth_pixels(6, 37, 41)),
        "one pixel": encode_image(smooth_pixels(7, 1, 1)),
    }


def pil_pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_decode_gives_pils_pixels() -> None:
    for name, data in special_images().items():
        assert np.array_equal(decode(np.frombuffer(data, np.uint8)), pil_pixels(data)), name


@needs_dali
def test_dali_decodes_to_pils_pixels(make_shard_set) -> None:
    """No crop and no resize: sizes are the target's, so what is left is decoding alone, bit for bit."""
    images = {name: data for name, data in special_images().items() if len(pil_pixels(data)) > 20}
    square = {}
    for name, data in images.items():
        image = Image.open(io.BytesIO(data))
        part = image.crop((0, 0, 32, 32))
        file = io.BytesIO()
        part.save(file, image.format, **({"subsampling": 2} if name == "4:2:0" else {}))
        square[name] = file.getvalue()
    samples = [Sample(data, 0) for data in square.values()]
    directory = make_shard_set({"train": samples, "validation": samples}, shards=1)
    config = document("dali", batch=len(samples), evaluate={"crop_fraction": 1.0, "batch": 16})
    pixels = by_key(evaluate(config, directory))
    for number, (name, data) in enumerate(square.items()):
        difference = np.abs(pixels[len(samples) + number, 0].astype(int) - pil_pixels(data))
        assert difference.max() <= (1 if name == "cmyk" else 0), name  # CMYK: rounded otherwise


@pytest.mark.parametrize("data", [b"", b"garbage", b"GIF89a" + bytes(50), b"\xff\xd8\xff\xe0" + bytes(100)])
def test_decode_refuses_what_is_no_image(data: bytes) -> None:
    with pytest.raises(BadRecord):
        decode(np.frombuffer(data, np.uint8))


def with_bad_records(bad: tuple[int, ...], count: int = 48) -> dict[str, list[Any]]:
    samples = varied_samples(count, 4)
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
    order = build_order(config, split)
    expected = {5: 7, 6: 7, 23: 0}  # the next good one of the same shard, around its end
    reader = build_loader(config, split, order, rank=0, world=1, device="cpu")
    with caplog.at_level(logging.WARNING, "podscale.input"):
        batches = list(reader.batches(0, 12))
    reader.close()
    assert reader.bad_records == 6
    assert len(caplog.records) == 3
    rows = np.concatenate([order.global_batch(step).rows for step in range(12)])
    used = [expected.get(row, row) for row in rows.tolist()]
    assert np.array_equal(np.concatenate([batch.keys for batch in batches]), split.keys[used])
    assert np.array_equal(np.concatenate([batch.labels for batch in batches]), split.labels[used])
    clean = by_key(train(config, directory, 0, 12, rank=0, world=1))
    again = by_key([batch for start in (0, 6) for batch in train(config, directory, start, start + 6)])
    assert all(np.array_equal(clean[key], again[key]) for key in clean)


@loaders
def test_a_substitute_looks_as_in_its_own_place(loader, make_shard_set) -> None:
    """In one epoch a sample is cropped one way, whether it was asked for or stands in for another."""
    directory = make_shard_set(with_bad_records((5, 6, 23)), shards=2)
    batches = train(document(loader), directory, 0, 6)
    keys = np.concatenate([batch.keys for batch in batches]).tolist()
    images = np.concatenate([np.asarray(batch.images) for batch in batches])
    repeated = {key for key in keys if keys.count(key) > 1}
    assert len(repeated) == 2
    for key in repeated:
        first, *others = [images[slot] for slot, other in enumerate(keys) if other == key]
        assert all(np.array_equal(first, image) for image in others)


def test_batches_are_prepared_ahead(make_shard_set) -> None:
    config = document(input={"prefetch": 3})
    split = ShardSet.open(make_shard_set()).split("train")
    loader = build_loader(config, split, build_order(config, split), rank=0, world=1, device="cpu")
    asked: list[int] = []
    at = loader._requests.at  # type: ignore[attr-defined]
    loader._requests.at = lambda step: (asked.append(step), at(step))[1]  # type: ignore[attr-defined]
    batches = loader.batches(0, 12)
    next(batches)
    assert asked == [0, 1, 2, 3]
    batches.close()  # type: ignore[attr-defined]
    loader.close()


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
    with pytest.raises(PodscaleError, match=r"more than input\.max_bad_rate 0\.001"):
        train(document(loader), directory, 0, 12)
    strict = document(loader, input={"max_bad_rate": 0})
    with pytest.raises(PodscaleError, match=r"[12] of (8|16|24) records"):
        train(strict, make_shard_set(with_bad_records((5, 11)), shards=1, name="two"), 0, 12)


@loaders
def test_a_shard_without_a_good_record_is_an_error_not_a_loop(loader, make_shard_set) -> None:
    directory = make_shard_set(with_bad_records(tuple(range(4)), count=4), shards=1)
    with pytest.raises(PodscaleError, match="no record of shard"):
        train(document(loader, batch=4), directory, 0, 2)


def test_an_image_of_another_size_than_the_index_says_is_bad(make_shard_set) -> None:
    samples = [Sample(encode_image(smooth_pixels(1, 30, 30)), 0, (31, 30))]
    dataset = ShardDataset(ShardSet.open(make_shard_set({"train": samples}, shards=1)).split("train"))
    with pytest.raises(BadRecord, match="30x30"):
        dataset[0]


def test_synthetic_images_are_keyed_and_keep_the_order(make_shard_set) -> None:
    directory = make_shard_set()
    config = document("synthetic")
    batches, again = (train(config, directory, 0, 12) for _ in range(2))
    split = ShardSet.open(directory).split("train")
    order = build_order(config, split)
    labels: dict[int, int] = {}
    for batch, other in zip(batches, again, strict=True):
        assert np.array_equal(batch.keys, split.keys[order.global_batch(batch.step).rows])
        assert np.array_equal(batch.images, other.images)
        for key, label in zip(batch.keys.tolist(), batch.labels.tolist(), strict=True):
            assert labels.setdefault(key, label) == label
    assert set(labels.values()) == {0, 1, 2, 3}
    assert batches[0].images.shape == (8, 32, 32, 3)


@pytest.mark.parametrize("loader", ["torchvision", pytest.param("dali", marks=needs_dali)])
def test_an_abandoned_loader_lets_the_interpreter_end_and_starts_no_process(loader, make_shard_set) -> None:
    """Decoding happens in threads of the rank: nothing is left behind however it ends, and nothing holds it up."""
    program = (
        "import os, sys\n"
        "from podscale.config.model import RunConfig\n"
        "from podscale.input import build_loader\n"
        "from podscale.order import build_order\n"
        "from podscale.shards.shardset import ShardSet\n"
        f"config = RunConfig.model_validate({document(loader).model_dump()!r})\n"
        f"split = ShardSet.open({str(make_shard_set())!r}).split('train')\n"
        "loader = build_loader(config, split, build_order(config, split), rank=0, world=1, device='cpu')\n"
        "batches = loader.batches(0, 10**6)\n"
        "next(batches)\n"
        "print('children:', open(f'/proc/self/task/{os.getpid()}/children').read())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "children:"


def test_auto_takes_dali_for_gpus_alone(monkeypatch) -> None:
    assert resolve_loader("auto", "cpu") == "torchvision"
    assert resolve_loader("auto", "cuda:1") == ("dali" if dali_installed() else "torchvision")
    monkeypatch.setattr("podscale.input.build.dali_installed", lambda: False)
    assert resolve_loader("auto", "cuda:1") == "torchvision", "there is no such device here"
    monkeypatch.setattr("podscale.input.build._nvjpeg_works", lambda device: device == "cuda:1")
    assert resolve_loader("auto", "cuda:1") == "nvjpeg"
    assert resolve_loader("synthetic", "cuda:1") == "synthetic"


def test_dali_where_it_is_not_installed(monkeypatch) -> None:
    monkeypatch.setattr("podscale.input.build.dali_installed", lambda: False)
    with pytest.raises(InputError, match="not installed"):
        resolve_loader("dali", "cpu")


def real_samples(archive: Path, count: int, every: int) -> list[Any]:
    with tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if member.name.lower().endswith((".jpg", ".jpeg"))]
        return [Sample(tar.extractfile(member).read(), 0) for member in members[::every][:count]]


@needs_dali
def test_real_images_are_alike_in_both_loaders(real_data, make_shard_set) -> None:
    samples = real_samples(real_data / "imagenet-500.tar", 40, 12)
    samples += real_samples(real_data / "imagenette224.tar", 40, 300)
    for sample in samples:
        assert np.array_equal(decode(np.frombuffer(sample.image, np.uint8)), pil_pixels(sample.image))
    directory = make_shard_set({"train": samples, "validation": samples})
    for run in (lambda c: train(c, directory, 0, 3), lambda c: evaluate(c, directory)):
        reference, other = (
            run(document(name, batch=32, size=224, evaluate={"batch": 32})) for name in ("torchvision", "dali")
        )
        for left, right in zip(reference, other, strict=True):
            assert np.array_equal(left.keys, right.keys)
            difference = np.abs(left.images.astype(int) - right.images)
            assert difference.mean() < 0.6
            assert np.percentile(difference, 99.9) <= 4


def test_crops_are_drawn_anew_by_seed_and_epoch(make_shard_set) -> None:
    """The order depends on the seed as well, so images are compared by their keys."""
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
