"""Spatial partitioning: each operation, and whole networks, give the results of whole images."""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from podscale.config import ModelSection
from podscale.jax import spatial
from podscale.jax.batch_norm import BatchNorm, ChannelStatistics, DeviceGroup
from podscale.jax.mesh import DEVICES, GROUP, RANKS, SPATIAL, arrange_devices
from podscale.jax.models import build_model, initialise
from podscale.jax.models.layers import NHWC_OIHW, stem_convolution
from podscale.jax.spatial import Parts, Tiles, plan_halo
from podscale.models import Window

pytestmark = [pytest.mark.timeout(900), pytest.mark.shallow]  # compiles whole networks, possibly on a busy machine
TILED, WHOLE = PartitionSpec(None, *SPATIAL), PartitionSpec()
CLASSES = 5
Values = np.ndarray[Any, Any]


def drawn(*shape: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def whole_numbers(*shape: int, seed: int = 0) -> Values:
    """Return integers as fp32; sums of their products are exact in any order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def mapped(body: Any, parts: Parts, in_specs: Any, out_specs: Any, ranks: int = 1) -> Any:
    """Return `body` mapped over `ranks` times `parts` devices; all ranks are one batch-norm group."""
    count = ranks * prod(parts)
    mesh = arrange_devices(jax.devices()[:count], np.arange(count).reshape(1, 1, count), ranks, parts)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def laid_out(x: Values, tiles: Tiles) -> Values:
    """Return the images padded to whole tiles with arbitrary numbers, which must not count."""
    beyond = [
        rows * parts - side for rows, parts, side in zip(tiles.tile_shape, tiles.parts, tiles.image_sides, strict=True)
    ]
    return np.pad(x, ((0, 0), (0, beyond[0]), (0, beyond[1]), (0, 0)), constant_values=7.0)


def cropped(x: Any, tiles: Tiles) -> Values:
    height, width = tiles.image_sides
    return np.asarray(x)[:, :height, :width]


def after(tiles: Tiles, window: Window) -> Tiles:
    return Tiles((window.output_size(tiles.image_sides[0]), window.output_size(tiles.image_sides[1])), tiles.parts)


@pytest.mark.parametrize(
    "window", [Window(3, 1, 1), Window(3, 2, 1), Window(1, 2, 0), Window(7, 2, 3), Window(11, 4, 2)]
)
def test_a_halo_has_the_rows_that_the_outputs_depend_on(window: Window) -> None:
    """By definition, for every side and number of parts; and no further rows if tiles are aligned."""
    for parts in range(1, 6):
        for side in range(max(1, window.kernel - 2 * window.padding), 40):
            halo = plan_halo(side, parts, window)
            part_side, outputs = -(-side // parts), window.output_size(side)
            of_outputs = -(-outputs // parts)
            for part_index in range(parts):
                low, high = part_index * part_side - halo.before, (part_index + 1) * part_side + halo.after
                for output in range(part_index * of_outputs, min((part_index + 1) * of_outputs, outputs)):
                    at = halo.starts[part_index] + (output - part_index * of_outputs) * window.stride
                    seen = range(low + at, low + at + window.kernel)
                    assert seen[0] == output * window.stride - window.padding
                    assert at + window.kernel <= halo.starts[part_index] + halo.rows
                    assert all(low <= row < high for row in seen if 0 <= row < side), (side, parts)
                    assert halo.needs_mask or all(row < side or row >= part_side * parts for row in seen), (side, parts)
            aligned = part_side * parts == side and part_side == of_outputs * window.stride
            if aligned and parts > 1 and part_side >= window.kernel:
                assert halo.before == window.padding
                assert halo.after == max(0, window.kernel - window.stride - window.padding)
                assert not halo.needs_mask


@pytest.mark.parametrize(
    ("sides", "parts", "window"),
    [
        ((16, 8), (4, 1), Window(3, 1, 1)),
        ((16, 8), (4, 2), Window(3, 2, 1)),
        ((14, 10), (4, 2), Window(3, 2, 1)),  # tiles of 4, 4, 4, 2 rows become 2, 2, 2, 1
        ((14, 9), (2, 2), Window(1, 2, 0)),  # 7 rows, of which the second tile skips the first
        ((28, 20), (4, 2), Window(7, 2, 3)),
        ((5, 16), (4, 1), Window(7, 1, 3)),  # halos larger than tiles, from devices two hops away; the last is idle
        ((24, 24), (2, 2), Window(11, 4, 2)),
    ],
)
def test_a_convolution_equals_that_of_the_full_image(sides: tuple[int, int], parts: Parts, window: Window) -> None:
    """Outputs and gradients are equal to the bit; pixels beyond the image get no gradient."""
    x, weight = whole_numbers(2, *sides, 3), whole_numbers(4, 3, window.kernel, window.kernel, seed=1)

    def convolve(x: Any, weight: Any, padding: int) -> Any:
        around = [(padding, padding)] * 2
        return lax.conv_general_dilated(x, weight, (window.stride,) * 2, around, dimension_numbers=NHWC_OIHW)

    expected, back = jax.vjp(lambda x, weight: convolve(x, weight, window.padding), x, weight)
    dy, tiles = whole_numbers(*expected.shape, seed=2), Tiles(sides, parts)
    outputs = after(tiles, window)

    def body(x: Any, weight: Any, dy: Any) -> Any:
        y, back = jax.vjp(of_tiles, x, weight)
        dx, dw = back(jnp.where(outputs.inside_mask(), dy, 0.0))
        return y, dx, lax.psum(dw, SPATIAL)

    def of_tiles(x: Any, weight: Any) -> Any:
        x, padding = spatial.exchange_halo(x, window, tiles)
        return convolve(x, weight, padding)

    run = mapped(body, parts, (TILED, WHOLE, TILED), (TILED, TILED, WHOLE))
    y, dx, dw = run(laid_out(x, tiles), weight, laid_out(dy, outputs))
    np.testing.assert_array_equal(cropped(y, outputs), expected)
    for result, exact in zip((cropped(dx, tiles), dw), back(dy), strict=True):
        np.testing.assert_array_equal(result, exact)
    assert not np.asarray(dx)[laid_out(np.zeros_like(x), tiles) == 7.0].any()


@pytest.mark.parametrize(("sides", "parts"), [((16, 8), (4, 2)), ((14, 9), (4, 2)), ((5, 6), (4, 1))])
def test_pooling_equals_that_of_the_full_image(sides: tuple[int, int], parts: Parts) -> None:
    """Max pool and gathering are equal to the bit, gradients included; the average up to the order of additions."""
    window, tiles = Window(3, 2, 1), Tiles(sides, parts)
    outputs = after(tiles, window)
    x = drawn(2, *sides, 3) - 5.0  # below the zeros that fill the halo at the border
    expected, back = jax.vjp(lambda x: spatial.max_pool(x, window, None), x)
    dy = drawn(*expected.shape, seed=1)

    def body(x: Any, dy: Any) -> Any:
        y, back = jax.vjp(lambda x: spatial.max_pool(x, window, tiles), x)
        (dx,) = back(jnp.where(outputs.inside_mask(), dy, 0.0))
        return y, dx, spatial.global_average_pool(x, tiles), spatial.gather_tiles(x, tiles)

    run = mapped(body, parts, (TILED, TILED), (TILED, TILED, WHOLE, WHOLE))
    y, dx, mean, gathered = run(laid_out(x, tiles), laid_out(dy, outputs))
    np.testing.assert_array_equal(cropped(y, outputs), expected)
    np.testing.assert_allclose(cropped(dx, tiles), back(dy)[0], rtol=1e-6)
    np.testing.assert_allclose(mean, x.mean((1, 2)), rtol=1e-6)
    np.testing.assert_array_equal(gathered, x)
    assert np.isfinite(np.asarray(y)).all()  # beyond the image too, because 0 * inf is NaN


@pytest.mark.parametrize("compute", ["plain", "padded4", "space_to_depth"])
def test_every_way_equals_the_plain_stem_over_tiles(compute: Any) -> None:
    window, tiles = Window(7, 2, 3), Tiles((28, 20), (4, 2))
    x, weight = drawn(2, 28, 20, 3), drawn(4, 3, 7, 7, seed=1)

    def body(x: Any, weight: Any) -> Any:
        x, padding = spatial.exchange_halo(x, window, tiles)
        return stem_convolution(x, weight, window.stride, padding, compute)

    result = mapped(body, tiles.parts, (TILED, WHOLE), TILED)(x, weight)
    expected = stem_convolution(jnp.asarray(x), jnp.asarray(weight), window.stride, window.padding)
    np.testing.assert_allclose(cropped(result, after(tiles, window)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", [None, 2], ids=["a batch", "parts of a batch"])
def test_batch_norm_has_the_statistics_of_full_images(part: int | None) -> None:
    """7 x 5 pixels in 4 x 2 tiles; pixels beyond the image do not count."""
    tiles = Tiles((7, 5), (4, 2))
    x, dy = drawn(4, 7, 5, 3) * 2 + 1, drawn(4, 7, 5, 3, seed=1)
    weight, bias = drawn(3, seed=2), drawn(3, seed=3)
    running = ChannelStatistics(np.zeros(3, np.float32), np.ones(3, np.float32))
    norm = BatchNorm(part_size=part)

    def along(cut: Tiles | None, x: Any, dy: Any) -> Any:
        y, back, moved = jax.vjp(
            lambda *parameters: norm.train(*parameters, running, cut), x, weight, bias, has_aux=True
        )
        return y, *back(dy), moved

    def body(x: Any, dy: Any) -> Any:
        y, dx, dw, db, moved = along(tiles, x, jnp.where(tiles.inside_mask(), dy, 0.0))
        return y, dx, lax.psum(dw, SPATIAL), lax.psum(db, SPATIAL), moved

    run = mapped(body, tiles.parts, (TILED, TILED), (TILED, TILED, WHOLE, WHOLE, WHOLE))
    y, dx, *others = run(laid_out(x, tiles), laid_out(dy, tiles))
    want_y, want_dx, *expected = along(None, x, dy)
    for result, exact in zip(
        [cropped(y, tiles), cropped(dx, tiles), *others], [want_y, want_dx, *expected], strict=True
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=5e-6), result, exact)


def network(model: ModelSection, side: int, dtype: Any, parts: Parts) -> dict[str, Any]:
    """Return logits, statistics and gradients of 4 images on two ranks."""
    parameters, statistics = initialise(model, CLASSES, seed=0)
    kinds = enumerate(parameters.items())
    wide = np.float64 if dtype == "float64" else np.float32
    parameters = {
        name: values.astype(wide) + (0.2 * drawn(*values.shape, seed=n)).astype(wide) * (values.ndim == 1)
        for n, (name, values) in kinds
    }
    running = {name: values.astype(wide) for name, values in statistics.items()}
    apply = build_model(model, norm=BatchNorm(group=DeviceGroup(GROUP)), dtype=dtype, parts=parts)

    def body(parameters: Any, running: Any, images: Any, direction: Any) -> Any:
        def along(parameters: Any) -> Any:
            logits, moved = apply(parameters, running, images, train=True)
            return (logits * direction).sum(), (logits, moved)

        gradients, (logits, moved) = jax.grad(along, has_aux=True)(parameters)
        return {"gradients": lax.pmean(gradients, DEVICES), "logits": logits, "statistics": moved}

    specs = WHOLE, WHOLE, PartitionSpec(RANKS, *SPATIAL), PartitionSpec(RANKS)
    out_specs = {"gradients": WHOLE, "logits": PartitionSpec(RANKS), "statistics": WHOLE}
    images, direction = drawn(4, side, side, 3, seed=1).astype(wide), drawn(4, CLASSES, seed=2).astype(wide)
    result = mapped(body, parts, specs, out_specs, ranks=2)(parameters, running, images, direction)
    return {
        "logits": {"": np.asarray(result["logits"])},
        **{kind: jax.tree.map(np.asarray, result[kind]) for kind in ("gradients", "statistics")},
    }


def compare(result: Any, expected: Any, tolerance: float) -> None:
    for kind, arrays in expected.items():
        for name, array in arrays.items():
            atol = tolerance * max(float(np.abs(array).max()), 1e-3)  # biases before a norm have only rounding
            np.testing.assert_allclose(result[kind][name], array, rtol=0, atol=atol, err_msg=f"{kind} {name}")


@pytest.mark.parametrize(
    ("model", "side", "parts"),
    [
        ({"name": "resnet50"}, 36, (2, 2)),  # sides 36, 18, 9, 5, 3, 2: even, then uneven
        ({"name": "resnet18", "block": "v2"}, 36, (2, 2)),
        ({"name": "alexnet", "alexnet": {"dropout": 0.0}}, 64, (4, 1)),  # 64, 15, 7, 3, 1: one row for 4 devices
    ],
    ids=["resnet50 in 2 x 2", "resnet18 v2 in 2 x 2", "alexnet in 4 x 1"],
)
def test_a_network_equals_that_of_full_images(model: dict[str, Any], side: int, parts: Parts) -> None:
    """Forward and backward in fp64, in which rounding hides no difference."""
    section = ModelSection.model_validate({"width": 4, **model})
    with jax.enable_x64(True):
        whole, cut = (network(section, side, "float64", ways) for ways in ((1, 1), parts))
    compare(cut, whole, tolerance=1e-9)


@pytest.mark.parametrize(("name", "side", "parts"), [("resnet50", 36, (2, 1)), ("resnet18", 64, (2, 2))])
def test_in_fp32_a_network_differs_by_rounding_only(name: str, side: int, parts: Parts) -> None:
    """Uneven tiles, then even ones. Gradients are compared as one vector, because a unit that rounds to the other side
    of ReLU's zero changes whole filters.
    """
    section = ModelSection.model_validate({"name": name, "width": 4})
    whole, cut = (network(section, side, "float32", ways) for ways in ((1, 1), parts))
    compare({**cut, "gradients": {}}, {**whole, "gradients": {}}, tolerance=2e-5)
    ends = [np.concatenate([array.ravel() for array in one["gradients"].values()]) for one in (cut, whole)]
    assert np.linalg.norm(ends[0] - ends[1]) < 5e-3 * np.linalg.norm(ends[1])
