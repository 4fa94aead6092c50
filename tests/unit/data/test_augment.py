"""RandAugment, TrivialAugment, random erasing and repeats against timm and torchvision; and their random draws."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from podscale.config import loads
from podscale.config.data import AugmentSection
from podscale.data.augment import LEVELS, RAND_AUGMENT, TRIVIAL_AUGMENT, Augmentation, FillMode
from podscale.data.loaders.build_loader import resolve_loader
from podscale.data.sampler import Sampler
from podscale.data.shard_set import ShardSet
from podscale.data.step_positions import StepPositions
from tests.support.loading import ON_CPU, document, train
from tests.support.refusals import refused

MEAN = (0.485, 0.456, 0.406)
FILL = (124, 116, 104)


def picture(seed: int = 0, size: int = 37) -> Image.Image:
    """Return a coloured image with edges and uneven values: noise over a gradient."""
    noise = np.random.default_rng(seed).integers(0, 90, (size, size, 3))
    slope = np.linspace(0, 150, size)[:, None, None] * np.array([1, 0.7, 0.4])
    return Image.fromarray((noise + slope).astype(np.uint8))


def augmentation(seed: int = 3, **section: Any) -> Augmentation:
    return Augmentation(AugmentSection.model_validate(section), seed, MEAN)


def draws(made: Augmentation, count: int) -> np.ndarray:
    return made.draws(np.zeros(count, dtype=np.int64), np.arange(count, dtype=np.uint64))


NAMES_IN_TIMM = {
    "autocontrast": "AutoContrast",
    "equalize": "Equalize",
    "invert": "Invert",
    "rotate": "Rotate",
    "posterize": "PosterizeIncreasing",
    "solarize": "SolarizeIncreasing",
    "solarize_add": "SolarizeAdd",
    "color": "ColorIncreasing",
    "contrast": "ContrastIncreasing",
    "brightness": "BrightnessIncreasing",
    "sharpness": "SharpnessIncreasing",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x_share": "TranslateXRel",
    "translate_y_share": "TranslateYRel",
}


def test_the_operations_of_rand_augment_are_timms() -> None:
    theirs = pytest.importorskip("timm.data.auto_augment")
    assert [NAMES_IN_TIMM[operation.name] for operation in RAND_AUGMENT] == theirs._RAND_INCREASING_TRANSFORMS


@pytest.mark.parametrize("operation", RAND_AUGMENT, ids=lambda operation: operation.name)
@pytest.mark.parametrize("negative", [False, True])
def test_an_operation_of_rand_augment_gives_timms_pixels(operation, negative, monkeypatch) -> None:
    theirs = pytest.importorskip("timm.data.auto_augment")
    monkeypatch.setattr(theirs, "_randomly_negate", lambda value: -value if negative else value)
    name = NAMES_IN_TIMM[operation.name]
    for magnitude in (0.0, 3.3, 6.0, 9.9):
        for resample in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC):
            level = theirs.LEVEL_TO_ARG[name]
            arguments = level(magnitude, {}) if level else ()
            want = theirs.NAME_TO_OP[name](picture(), *arguments, fillcolor=FILL, resample=resample)
            augmented = operation(picture(), magnitude / 10, negative=negative, fill_mode=FillMode(resample, FILL))
            assert np.array_equal(np.asarray(augmented), np.asarray(want)), (magnitude, resample)


@pytest.mark.parametrize("number", range(len(TRIVIAL_AUGMENT)), ids=lambda number: TRIVIAL_AUGMENT[number].name)
@pytest.mark.parametrize("negative", [False, True])
def test_an_operation_of_trivial_augment_gives_torchvisions_pixels(number, negative) -> None:
    from torchvision.transforms import InterpolationMode, TrivialAugmentWide, autoaugment

    space = TrivialAugmentWide()._augmentation_space(LEVELS)
    assert len(space) == len(TRIVIAL_AUGMENT)
    name, (magnitudes, signed) = list(space.items())[number]
    operation = TRIVIAL_AUGMENT[number]
    assert operation.name.replace("_", "") == name.lower()
    assert operation.is_signed == signed
    turned = negative != operation.name.startswith("translate")  # torchvision moves the image, we (as timm) the frame
    for strength in range(0, LEVELS, 3):
        magnitude = round(float(magnitudes[strength]), 5) if magnitudes.ndim else 0.0  # fp32 has 15.999999 for 16
        magnitude *= -1 if signed and negative else 1
        want = autoaugment._apply_op(picture(), name, magnitude, InterpolationMode.BILINEAR, None)
        look = FillMode(Image.Resampling.BILINEAR, (0, 0, 0))
        augmented = operation(picture(), strength / (LEVELS - 1), negative=turned, fill_mode=look)
        difference = np.abs(np.asarray(augmented).astype(int) - np.asarray(want))
        if operation.name.startswith("shear"):  # torchvision's slope is the tangent of an arc tangent
            assert difference.max() <= 1
            assert (difference > 0).mean() < 0.01
        else:
            assert not difference.any(), strength


def test_posterize_keeps_the_highest_bits() -> None:
    """The largest magnitude keeps no bits, which Pillow 13, and so timm, refuses."""
    operation = next(one for one in RAND_AUGMENT if one.name == "posterize")
    look = FillMode(Image.Resampling.BILINEAR, FILL)
    assert not np.asarray(operation(picture(), 1.0, negative=False, fill_mode=look)).any()
    augmented = np.asarray(operation(picture(), 0.5, negative=False, fill_mode=look))
    assert np.array_equal(augmented, np.asarray(picture()) & 0b11000000)


def test_rand_augment_as_timm_draws_it() -> None:
    """Number, kind, strength, sign and interpolation of the operations."""
    from scipy import stats  # imported here, because it takes a second of every collection

    made = augmentation(policy="rand_augment", rand_augment={"magnitude": 7, "layers": 2, "probability": 0.5})
    seen: list[tuple[str, float, bool, FillMode]] = []

    def watched(name: str) -> Any:
        def operation(image: Image.Image, level: float, *, negative: bool, fill_mode: FillMode) -> Image.Image:
            seen.append((name, level, negative, fill_mode))
            return image

        return operation

    images = 4000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("podscale.data.augment.RAND_AUGMENT", [watched(operation.name) for operation in RAND_AUGMENT])
        for drawn in draws(made, images):
            made(picture(size=4), drawn)
    assert len(seen) / images == pytest.approx(2 * 0.5, abs=0.04)
    counts = [sum(name == operation.name for name, *_ in seen) for operation in RAND_AUGMENT]
    assert stats.chisquare(counts).pvalue > 1e-3
    levels = np.array([level for _, level, _, _ in seen])
    assert stats.kstest(levels, stats.norm(0.7, 0.05).cdf).pvalue > 1e-3
    assert np.mean([negative for _, _, negative, _ in seen]) == pytest.approx(0.5, abs=0.04)
    smooth = [look.resample for *_, look in seen]
    assert np.mean([one == Image.Resampling.BICUBIC for one in smooth]) == pytest.approx(0.5, abs=0.04)
    assert {look.fill for *_, look in seen} == {FILL}


def test_a_strength_stays_within_its_scale() -> None:
    made = augmentation(policy="rand_augment", rand_augment={"magnitude": 9.5, "deviation": 4, "layers": 1})
    levels: list[float] = []

    def keep(image: Image.Image, level: float, **_: Any) -> Image.Image:
        levels.append(level)
        return image

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("podscale.data.augment.RAND_AUGMENT", [keep])
        for drawn in draws(made, 400):
            made(picture(size=4), drawn)
    assert max(levels) == 1.0
    assert min(levels) >= 0.0


def test_trivial_augment_draws_one_operation_of_one_of_31_strengths() -> None:
    from scipy import stats  # here: it takes a second of all who only collect

    made, seen = augmentation(policy="trivial_augment"), []

    def watched(name: str) -> Any:
        return lambda image, level, negative, fill_mode: seen.append((name, round(level * 30, 9))) or image

    images = 6000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("podscale.data.augment.TRIVIAL_AUGMENT", [watched(one.name) for one in TRIVIAL_AUGMENT])
        for drawn in draws(made, images):
            made(picture(size=4), drawn)
    assert len(seen) == images
    assert stats.chisquare([sum(name == one.name for name, _ in seen) for one in TRIVIAL_AUGMENT]).pvalue > 1e-3
    strengths = [strength for _, strength in seen]
    assert sorted(set(strengths)) == list(range(LEVELS))
    assert stats.chisquare([strengths.count(number) for number in range(LEVELS)]).pvalue > 1e-3


def rectangle(before: np.ndarray, after: np.ndarray) -> tuple[int, int, int, int] | None:
    """Return top, left, height, width of the changed pixels; assert that they are a rectangle of the mean colour."""
    changed = (before != after).any(axis=2)
    if not changed.any():
        return None
    rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
    part = after[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    assert (part == FILL).all()
    return rows[0], columns[0], len(rows), len(columns)


def test_an_erased_rectangle_is_one_of_torchvisions() -> None:
    """Compare the distributions of areas, ratios and positions with those of RandomErasing."""
    import torch
    from scipy import stats  # here: it takes a second of all who only collect
    from torchvision.transforms import RandomErasing

    size, count = 64, 3000
    before = np.zeros((size, size, 3), dtype=np.uint8)
    made = augmentation(erase=0.25)
    augmented = [rectangle(before, made(Image.fromarray(before), drawn)) for drawn in draws(made, count)]
    erased = np.array([one for one in augmented if one])
    assert len(erased) / count == pytest.approx(0.25, abs=0.03)
    torch.manual_seed(0)
    blank = torch.zeros(3, size, size)
    want = np.array([RandomErasing.get_params(blank, (0.02, 0.33), (0.3, 3.3), [0.0])[:4] for _ in range(count)])
    want = want[want[:, 2] < size]
    for of in (
        lambda part: part[:, 2] * part[:, 3],
        lambda part: part[:, 2] / part[:, 3],
        lambda part: part[:, 0] / (size - part[:, 2]),
        lambda part: part[:, 1] / (size - part[:, 3]),
    ):
        assert stats.kstest(of(erased), of(want)).pvalue > 1e-3
    everywhere = augmentation(erase=1.0)
    assert all(rectangle(before, everywhere(Image.fromarray(before), one)) for one in draws(everywhere, 50))


WANTED = {"policy": "rand_augment", "erase": 0.3}


def images(shards: Path, start: int, stop: int, world: int = 1, **run: Any) -> dict[tuple[int, int, int], bytes]:
    """Return {(step, key, nth of the step): pixels}, gathered from all ranks."""
    config = document(batch=12, input={"augment": WANTED, "repeats": 2}, run={"seed": 4, **run})
    augmented: dict[tuple[int, int, int], bytes] = {}
    for rank in range(world):
        for batch in train(config, shards, start, stop, ranks=range(rank, rank + 1), world=world):
            for slot, (key, image) in enumerate(zip(batch.keys.tolist(), batch.images, strict=True)):
                augmented[batch.step, key, slot * world + rank] = image.tobytes()
    return augmented


def test_changes_depend_on_seed_epoch_and_sample_alone(make_shard_set) -> None:
    shards = make_shard_set()
    whole = images(shards, 0, 6)
    assert images(shards, 0, 6, world=3) == whole, "not on the ranks"
    assert images(shards, 4, 6) == {name: image for name, image in whole.items() if name[0] >= 4}, "nor on the start"
    assert images(shards, 0, 6, seed=5) != whole


def test_draws_are_keyed_by_seed_epoch_and_sample() -> None:
    def drawn(seed: int = 3, epoch: int = 0, key: int = 5) -> list[float]:
        made = augmentation(seed, **WANTED)
        return made.draws(np.array([epoch]), np.array([key], dtype=np.uint64))[0].tolist()

    assert drawn() == drawn()
    others = [drawn(seed=4), drawn(epoch=1), drawn(key=6)]
    assert all(len(set(drawn()) & set(other)) == 0 for other in others)
    assert len(set(drawn())) == len(drawn()) == 2 * 6 + 23


def test_the_loader_changes_what_it_cropped(make_shard_set) -> None:
    """Reference: the same crops without augmentation, then augmented by hand."""
    shards = make_shard_set()
    plain = train(document(batch=12), shards, 0, 4)
    changed = train(document(batch=12, input={"augment": WANTED}), shards, 0, 4)
    section = AugmentSection.model_validate(WANTED)
    made, different = Augmentation(section, 4, MEAN), 0
    count = 0
    size = len(ShardSet.open(shards).split("train"))
    for before, after in zip(plain, changed, strict=True):
        epochs = np.arange(before.step * 12, before.step * 12 + 12) // size
        for image, drawn, augmented in zip(before.images, made.draws(epochs, before.keys), after.images, strict=True):
            assert np.array_equal(made(Image.fromarray(image), drawn), augmented)
            different += not np.array_equal(image, augmented)
            count += 1
    assert different > count / 3


@pytest.mark.parametrize(("repeats", "world", "count"), [(3, 4, 100), (4, 2, 96), (3, 2, 256 * 3 + 5)])
def test_repeats_are_those_of_timms_sampler(repeats: int, world: int, count: int, monkeypatch) -> None:
    """Given the same permutation, each rank has the same samples in the same order in every epoch."""
    import torch

    sampler = pytest.importorskip("timm.data.distributed_sampler").RepeatAugSampler
    batch = count // world * world
    plain, repeated = (Sampler(1, StepPositions.constant(batch, batch), repeats=times) for times in (1, repeats))
    for epoch in range(3):
        rows = plain.global_batch(epoch).rows
        monkeypatch.setattr(torch, "randperm", lambda n, generator, rows=rows: torch.from_numpy(rows))
        for rank in range(world):
            theirs = sampler(range(batch), world, rank, num_repeats=repeats, selected_round=0)
            theirs.set_epoch(epoch)
            assert repeated.rank_batch(epoch, rank, world).rows.tolist() == list(theirs)


def test_repeats_are_augmented_differently() -> None:
    order = Sampler(1, StepPositions.constant(30, 45), repeats=3)
    seen: list[tuple[int, int]] = []
    for step in range(4):
        slots = order.global_batch(step)
        seen += zip(slots.rows.tolist(), slots.epochs.tolist(), strict=True)
    assert len(set(seen)) == len(seen) == 180
    assert len({row for row, _ in seen[:30]}) == 10, "an epoch sees a third of the samples"


def test_a_policy_and_random_filters_are_the_reference_loaders() -> None:
    assert loads("input: {interpolation: random}").input.needs_cpu_loader
    assert loads("input: {augment: {erase: 0.1}}").input.needs_cpu_loader
    assert not loads("input: {interpolation: bicubic}").input.needs_cpu_loader
    assert resolve_loader("auto", "cuda:0", needs_cpu_loader=True) == ON_CPU
    for loader in ("dali", "nvjpeg"):
        with refused("input.augment", field="input.loader", got=loader):
            loads(f"input: {{loader: {loader}, augment: {{erase: 0.1}}}}")
        with refused("input.interpolation=random", field="input.loader", got=loader):
            loads(f"input: {{loader: {loader}, interpolation: random}}")


def test_options_of_another_policy_are_refused() -> None:
    with refused("trivial_augment", field="input.augment.rand_augment"):
        loads("input: {augment: {policy: trivial_augment, rand_augment: {magnitude: 7}}}")
