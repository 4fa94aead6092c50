"""The steps of benchmarks/tpu_flags: both updates train alike, and have the messages that the page says."""

from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks.tpu_flags import AXIS, RATE, DenseStep, build_step, loss, messages_text, step_arguments
from podscale.jax.aot.hlo import find_collectives

MATRICES, SIDE, IMAGES = 3, 16, 2


@pytest.mark.parametrize(("is_sharded", "text"), [(False, "1 all-reduce"), (True, "3 all-gathers, 3 reduce-scatters")])
def test_a_step_is_one_of_sgd_over_the_images_of_all_devices(is_sharded: bool, text: str) -> None:
    """XLA merges the all-reduces of the gradients; those of a sharded update stay."""
    step, mesh = DenseStep(is_sharded, MATRICES, SIDE, IMAGES), Mesh(np.array(jax.devices()[:4]), AXIS)
    shapes, image_shape = step_arguments(step, mesh)
    generator = np.random.default_rng(0)
    weights = [generator.normal(size=shape.shape).astype(np.float32) / SIDE**0.5 for shape in shapes]
    images = generator.normal(size=image_shape.shape).astype(np.float32)
    gradients = jax.grad(loss)(weights, images)
    compiled = build_step(step, mesh).lower(shapes, image_shape).compile()
    given = [jax.device_put(weight, shape.sharding) for weight, shape in zip(weights, shapes, strict=True)]
    found = compiled(given, jax.device_put(images, image_shape.sharding))
    for weight, gradient, new in zip(weights, gradients, found, strict=True):
        # Each device has the mean over its own images, and the step adds those of four.
        np.testing.assert_allclose(new, weight - RATE * 4 * gradient, rtol=1e-5, atol=1e-6)
    collectives = find_collectives(compiled.as_text(), {AXIS: 4})
    assert Counter(one.kind for one in collectives).keys() <= {"all-reduce", "all-gather", "reduce-scatter"}
    assert messages_text(collectives) == text
