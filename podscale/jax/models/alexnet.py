"""AlexNet (Krizhevsky 2012) with batch norm in place of local response normalisation (You 2017, Jia 2018)."""

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, nn, random

from podscale.config import ModelSection
from podscale.jax.models.layers import LayerApplier
from podscale.models.alexnet import FC6_INPUT_SIDE, FIRST_WINDOW, GROUPED, POOL_WINDOW, POOLED


def alexnet(layers: LayerApplier, images: Array, model: ModelSection, key: Array | None = None) -> Array:
    """Return logits fp32 [n, classes] of float `images` [n, height, width, 3]. Without a `key` there is no dropout."""
    options = model.alexnet
    x = layers.stem("conv1", images, stride=FIRST_WINDOW.stride, padding=FIRST_WINDOW.padding)
    for number in range(1, 6):
        if number > 1:
            groups = options.groups if number in GROUPED else 1
            x = layers.convolution(f"conv{number}", x, groups=groups)
        if options.convolution_norm:
            x = layers.norm(f"bn{number}", x)
        x = nn.relu(x)
        if number in POOLED:
            x = layers.max_pool(x, *POOL_WINDOW)
    if options.pool5_norm:
        x = layers.norm("bn_pool5", x)
    x = adaptive_average_pool(layers.gather_tiles(x), FC6_INPUT_SIDE)
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)  # fc6 counts its inputs channel by channel
    for number, name in enumerate(("fc6", "fc7")):
        x = dropout(nn.relu(layers.linear(name, x)), options.dropout, key, number)
    return layers.linear("fc8", x)


def adaptive_average_pool(x: Array, output_side: int) -> Array:
    """Average images `x` [n, height, width, channels] to `output_side` x `output_side` pixels, as torch does."""
    if x.shape[1:3] == (output_side, output_side):
        return x
    rows, columns = (jnp.asarray(averaging_matrix(side, output_side), x.dtype) for side in x.shape[1:3])
    return jnp.einsum("ih,nhwc,jw->nijc", rows, x, columns)


def averaging_matrix(side: int, output_side: int) -> npt.NDArray[np.float64]:
    """Return the matrix [output_side, side] that averages one dimension."""
    matrix = np.zeros((output_side, side))
    for output in range(output_side):
        start, stop = output * side // output_side, -(-(output + 1) * side // output_side)
        matrix[output, start:stop] = 1.0 / (stop - start)
    return matrix


def dropout(x: Array, rate: float, key: Array | None, number: int) -> Array:
    """Set the fraction `rate` of `x` to 0 and scale the rest; `number` distinguishes the layers that share a `key`."""
    if key is None or not rate:
        return x
    mask = random.bernoulli(random.fold_in(key, number), 1.0 - rate, x.shape)
    return jnp.where(mask, x / (1.0 - rate), 0.0)
