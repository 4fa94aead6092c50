"""Crop rectangles: their limits, their distribution, their independence, and golden values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.config import loads
from podscale.config.schedule import CropSection
from podscale.data.crop import CropParamsBatch, evaluation_crops, random_filters, training_crops
from tests.support.refusals import refused


def views(
    keys: np.ndarray, width: int, height: int, *, epoch: int = 0, seed: int = 0, **crop: object
) -> CropParamsBatch:
    full = np.full(len(keys), 1)
    return training_crops(
        seed, full * epoch, keys, full * width, full * height, crop=CropSection.model_validate(crop), size=224
    )


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**63 - 1))
@settings(max_examples=100, deadline=None)
def test_crops_lie_inside_the_image(width: int, height: int, seed: int) -> None:
    made = views(np.arange(16, dtype=np.uint64), width, height, seed=seed)
    assert (made.left >= 0).all()
    assert (made.top >= 0).all()
    assert (made.width >= 1).all()
    assert (made.height >= 1).all()
    assert (made.left + made.width <= width).all()
    assert (made.top + made.height <= height).all()


def test_crops_have_the_configured_areas_ratios_positions_and_flips() -> None:
    made = views(np.arange(20_000, dtype=np.uint64), 500, 400)
    area = made.width * made.height / 200_000
    ratio = made.width / made.height
    assert 0.078 < area.min() < 0.09
    assert 0.95 < area.max() <= 1
    assert 0.73 < ratio.min() < 0.77
    assert 1.3 < ratio.max() < 1.36
    small = area < 0.4  # such rectangles always fit: uniform in area and in the logarithm of the ratio
    assert np.histogram(area[small], 8, (0.08, 0.4))[0] / small.sum() == pytest.approx(np.full(8, 1 / 8), abs=0.02)
    logs = np.log(ratio[small])
    limit = np.log(4 / 3)
    assert np.histogram(logs, 8, (-limit, limit))[0] / small.sum() == pytest.approx(np.full(8, 1 / 8), abs=0.02)
    position = made.left[small] / (500 - made.width[small])
    assert np.histogram(position, 5, (0, 1))[0] / small.sum() == pytest.approx(np.full(5, 1 / 5), abs=0.02)
    assert made.flip.mean() == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(made.flip, made.left)[0, 1]) < 0.03


def test_a_shape_that_no_draw_fits_gets_the_largest_centred_crop() -> None:
    wide, tall = views(np.arange(50, dtype=np.uint64), 2000, 20), views(np.arange(50, dtype=np.uint64), 20, 2000)
    assert (wide.height[wide.width == 27] == 20).all()
    assert ((wide.width == 27) & (wide.left == 986)).any()
    assert ((tall.height == 27) & (tall.top == 986)).any()
    whole = views(np.arange(5, dtype=np.uint64), 50, 50, scale=(1, 1), ratio=(1, 1), flip=0)
    assert (whole.width == 50).all()
    assert not whole.flip.any()


def test_a_crop_depends_on_seed_epoch_and_key_alone() -> None:
    keys = np.arange(100, dtype=np.uint64)
    every = views(keys, 300, 200)
    alone = views(keys[37:38], 300, 200)
    assert every[37] == alone[0]
    for other in (views(keys, 300, 200, epoch=1), views(keys, 300, 200, seed=1)):
        assert sum(every[i] == other[i] for i in range(100)) < 5


def test_a_filter_depends_on_seed_epoch_and_key_alone() -> None:
    """It is drawn apart from the crop, so half of the mirrored and half of the other crops have each filter."""
    keys = np.arange(20_000, dtype=np.uint64)
    drawn = random_filters(3, np.full(len(keys), 1), keys)
    assert np.array_equal(drawn[7:19], random_filters(3, np.full(12, 1), keys[7:19]))
    golden = [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]
    assert random_filters(7, np.full(16, 2), keys[:16]).tolist() == golden
    for other in (random_filters(4, np.full(len(keys), 1), keys), random_filters(3, np.full(len(keys), 2), keys)):
        assert (drawn == other).mean() == pytest.approx(0.5, abs=0.02)
    made = views(keys, 500, 400, seed=3, epoch=1)
    for chosen in (made.flip, ~made.flip, made.left > np.median(made.left), made.width > np.median(made.width)):
        assert drawn[chosen].mean() == pytest.approx(0.5, abs=0.02)


def test_golden_crops() -> None:
    """These decide the pixels of every run. Changing them makes all runs irreproducible."""
    made = views(np.array([0, 1, 123456789], dtype=np.uint64), 500, 375, epoch=2, seed=7)
    assert [(*made[i][:4], made[i].flip) for i in range(3)] == [
        (5, 10, 364, 334, False),
        (278, 17, 212, 278, True),
        (45, 8, 323, 245, True),
    ]


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(8, 300), st.sampled_from([0.8, 0.875, 1.0]))
@settings(max_examples=200, deadline=None)
def test_evaluation_squares_lie_inside_the_resized_image(width: int, height: int, size: int, fraction: float) -> None:
    view = evaluation_crops(np.array([width]), np.array([height]), size=size, fraction=fraction)[0]
    assert min(view.out_width, view.out_height) == max(size, round(size / fraction))
    assert (view.left, view.top, view.width, view.height) == (0, 0, width, height)
    assert 0 <= view.out_left <= view.out_width - size
    assert 0 <= view.out_top <= view.out_height - size
    assert abs((view.out_width - size) / 2 - view.out_left) <= 0.5


def test_evaluation_of_the_classic_size() -> None:
    view = evaluation_crops(np.array([500]), np.array([375]), size=224, fraction=0.875)[0]
    assert (view.out_width, view.out_height, view.out_left, view.out_top) == (341, 256, 58, 16)


def test_squares_of_the_short_side_are_those_of_a_resized_image() -> None:
    """224 of a short side of 256: all squares have the same size, and every position occurs."""
    made = views(np.arange(20_000, dtype=np.uint64), 512, 256, short_side=0.875)
    assert (made.width == 224).all()
    assert (made.height == 224).all()
    assert (made.left.min(), made.left.max(), made.top.min(), made.top.max()) == (0, 288, 0, 32)
    assert made.flip.mean() == pytest.approx(0.5, abs=0.02)
    drawn = views(np.arange(20_000, dtype=np.uint64), 512, 256)
    assert np.array_equal(made.flip, drawn.flip), "the mirror is drawn from the same stream"
    tiny = views(np.arange(5, dtype=np.uint64), 1, 1, short_side=0.01)
    assert (tiny.width == 1).all()


def test_padded_crops_take_every_position_and_flip() -> None:
    """Crops of 224 from 232 pixels: 9 x 9 positions, equally likely, as are mirrored images."""
    made = views(np.arange(40_000, dtype=np.uint64), 32, 32, padding=4)
    assert not made.left.any()
    assert not made.top.any()
    assert (made.out_width == 224).all()
    assert (made.out_height == 224).all()
    positions = np.histogram2d(made.out_left, made.out_top, bins=[np.arange(-4, 6)] * 2)[0]
    assert positions.sum() == 40_000
    assert positions.min() > 400
    assert positions.max() < 590
    assert made.flip.mean() == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(made.out_left, made.out_top)[0, 1]) < 0.03
    assert abs(np.corrcoef(made.flip, made.out_left)[0, 1]) < 0.03


def test_padded_crops_of_a_long_image_reach_both_of_its_ends() -> None:
    made = views(np.arange(20_000, dtype=np.uint64), 100, 50, padding=2, flip=0)
    assert (made.out_width == 448).all()
    assert (made.out_height == 224).all()
    assert (made.out_left.min(), made.out_left.max()) == (-2, 448 - 224 + 2)
    assert (made.out_top.min(), made.out_top.max()) == (-2, 2)
    assert not made.flip.any()
    whole = views(np.arange(9, dtype=np.uint64), 60, 60, padding=0)
    assert not whole.out_left.any()
    assert not whole.out_top.any()


def test_a_padded_crop_depends_on_seed_epoch_and_key_alone() -> None:
    """The first values are pinned: they decide the pixels of every run."""
    keys = np.arange(100, dtype=np.uint64)
    every = views(keys, 32, 32, padding=4, epoch=2, seed=7)
    assert every[37] == views(keys[37:38], 32, 32, padding=4, epoch=2, seed=7)[0]
    for other in (views(keys, 32, 32, padding=4, epoch=3, seed=7), views(keys, 32, 32, padding=4, epoch=2, seed=8)):
        assert sum(every[i] == other[i] for i in range(100)) < 8
    assert [(every[i].out_left, every[i].out_top, every[i].flip) for i in range(3)] == [
        (-4, -2, False),
        (4, -3, True),
        (-2, -1, False),
    ]


@pytest.mark.parametrize(
    ("text", "field", "got"),
    [
        ("input: {crop: {padding: -1}}", "input.crop.padding", -1),
        ("input: {crop: {padding: 4, short_side: 0.875}}", "input.crop.padding", 4),
        ("input: {crop: {padding: 4, scale: [0.5, 1.0]}}", "input.crop.padding", 4),
        ("input: {crop: {padding: 4, ratio: [1.0, 1.0]}}", "input.crop.padding", 4),
        ("input: {image_size: 32, crop: {padding: 32}}", "input.crop.padding", 32),
        (
            "{input: {image_size: 64}, train: {phases: [{start: 1, crop: {padding: 64}}]}}",
            "train.phases.0.crop.padding",
            64,
        ),
    ],
)
def test_impossible_paddings_are_refused(text: str, field: str, got: int) -> None:
    with refused(field=field, got=got):
        loads(text)
