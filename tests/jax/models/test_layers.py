"""Convolutions by matrix products, as on a CPU, equal torch's in fp64; accelerators use XLA's own."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.sharding import Mesh

from podscale.config import ModelSection
from podscale.data.step_positions import step_positions
from podscale.jax import spatial
from podscale.jax.mesh import mesh_for_config
from podscale.jax.models import build_model, initialise
from podscale.jax.models.layers import choose_convolution, matmul_convolution, stem_convolution, xla_convolution
from podscale.jax.spatial import Tiles
from podscale.jax.train_step import build_train_step
from podscale.models import Window
from tests.jax.test_spatial import SPATIAL, TILED, WHOLE, after, cropped, drawn, laid_out, mapped
from tests.jax.test_train_step import CLASSES, RESNET, SAMPLES, SCHEDULE, batches, begin, document

CLASSES_OF_SHAPE = {
    "one pixel": (1, 1, 1, (5, 6)),
    "one pixel with stride": (1, 2, 1, (5, 6)),
    "one pixel in groups": (1, 1, 2, (5, 6)),
    "fewer pixels than the kernel": (3, 1, 1, (2, 2)),
    "fewer outputs than the kernel has pixels": (3, 2, 1, (4, 4)),
    "one output": (3, 2, 1, (2, 1)),
    "few pixels in groups": (5, 1, 2, (3, 4)),
    "groups": (3, 1, 2, (7, 6)),
    "plain": (3, 1, 1, (7, 6)),
    "plain with stride": (3, 2, 1, (8, 7)),
    "the stem of AlexNet": (11, 4, 1, (63, 63)),
    "the stem of ResNet": (7, 2, 1, (33, 32)),
}


@pytest.mark.parametrize("name", CLASSES_OF_SHAPE)
def test_products_equal_torchs_convolution(name: str) -> None:
    """Outputs and both gradients in fp64, and outputs in fp32 within its rounding."""
    kernel, stride, groups, sides = CLASSES_OF_SHAPE[name]
    generator = np.random.default_rng(0)
    x, weight = generator.normal(size=(3, *sides, 4)), generator.normal(size=(6, 4 // groups, kernel, kernel))
    of_x, of_weight = torch.from_numpy(x).requires_grad_(), torch.from_numpy(weight).requires_grad_()
    images = of_x.permute(0, 3, 1, 2)
    outputs = torch.conv2d(images, of_weight, stride=stride, padding=kernel // 2, groups=groups).permute(0, 2, 3, 1)
    dy = generator.normal(size=outputs.shape)
    outputs.backward(torch.from_numpy(dy))

    def convolve(x: Any, weight: Any) -> Any:
        return matmul_convolution(x, weight, stride, kernel // 2, groups)

    def both_ways(x: Any, weight: Any, dy: Any) -> Any:
        y, back = jax.vjp(convolve, x, weight)
        return y, *back(dy)

    with jax.enable_x64(True):
        y, dx, dw = jax.jit(both_ways)(x, weight, dy)
        for computed, exact in ((y, outputs.detach()), (dx, of_x.grad), (dw, of_weight.grad)):
            np.testing.assert_allclose(computed, exact, rtol=1e-10, atol=1e-11)
    short = jax.jit(convolve)(x.astype(np.float32), weight.astype(np.float32))
    assert short.dtype == jnp.float32
    np.testing.assert_allclose(short, outputs.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("sides", "window"), [((16, 8), Window(3, 1, 1)), ((8, 8), Window(3, 2, 1)), ((14, 9), Window(1, 2, 0))]
)
def test_products_over_tiles_equal_those_over_the_image(sides: tuple[int, int], window: Window) -> None:
    """Tiles have fewer pixels, so a device may use products although whole images would not."""
    tiles = Tiles(sides, (4, 2))
    x, weight = drawn(2, *sides, 3), drawn(4, 3, window.kernel, window.kernel, seed=1)
    want, back = jax.vjp(lambda x, weight: xla_convolution(x, weight, window.stride, window.padding), x, weight)
    dy, outputs = drawn(*want.shape, seed=2), after(tiles, window)

    def of_tiles(x: Any, weight: Any) -> Any:
        x, padding = spatial.exchange_halo(x, window, tiles)
        return matmul_convolution(x, weight, window.stride, padding)

    def body(x: Any, weight: Any, dy: Any) -> Any:
        y, back = jax.vjp(of_tiles, x, weight)
        dx, dw = back(jnp.where(outputs.inside_mask(), dy, 0.0))
        return y, dx, lax.psum(dw, SPATIAL)

    run = mapped(body, tiles.parts, (TILED, WHOLE, TILED), (TILED, TILED, WHOLE))
    y, dx, dw = run(laid_out(x, tiles), weight, laid_out(dy, outputs))
    want_dx, want_dw = back(dy)
    np.testing.assert_allclose(cropped(y, outputs), want, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(cropped(dx, tiles), want_dx, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(dw, want_dw, rtol=1e-5, atol=2e-5)


def test_a_folded_stem_can_use_products() -> None:
    x, weight = drawn(2, 32, 32, 3), drawn(4, 3, 7, 7, seed=1)
    outputs = jax.jit(lambda x, weight: stem_convolution(x, weight, 2, 3, "space_to_depth", matmul_convolution))(
        x, weight
    )
    np.testing.assert_allclose(outputs, xla_convolution(x, weight, 2, 3), rtol=1e-4, atol=1e-4)


def convolutions(lowered: Any) -> list[str]:
    return [line for line in lowered.as_text().splitlines() if "stablehlo.convolution" in line]


def test_accelerators_run_one_convolution_per_layer() -> None:
    """The forward pass lowered for a TPU has no matrix products in place of convolutions."""
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]))
    model = ModelSection(name="resnet18", stem="small", width=8)
    parameters, statistics = initialise(model, CLASSES, seed=0)

    def lowered(on: Mesh) -> list[str]:
        network = build_model(model, convolve=choose_convolution(on))
        traced = jax.jit(lambda images: network(parameters, statistics, images, train=True)).trace(drawn(2, 16, 16, 3))
        return convolutions(traced.lower(lowering_platforms=("tpu",)))

    assert len(lowered(mesh)) == 20
    assert len(lowered(Mesh(jax.devices()[:1], "x"))) == 13, "3 x 3 on 2 x 2 pixels and 1 x 1 are products"


def test_a_step_on_cpus_uses_products() -> None:
    """Each of the 13 remaining convolutions has three, with its two gradients; the first has two."""
    config = document(RESNET)
    step = build_train_step(
        config, mesh_for_config(config, jax.devices()[:1]), CLASSES, step_positions(config.train, SAMPLES)
    )
    images, labels = batches(config.input.image_size)
    lowered = step.run_steps.lower(begin(step, config), step.put_batches(images[:1], labels[:1]), SCHEDULE)
    assert len(convolutions(lowered)) == 3 * 13 - 1
