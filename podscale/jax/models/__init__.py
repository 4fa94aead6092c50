"""Networks by their names in the document, as pure functions of arrays by the model spec's names."""

from typing import Protocol

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from podscale import models
from podscale.config import ModelSection
from podscale.jax import spatial
from podscale.jax.batch_norm import BatchNorm
from podscale.jax.models.alexnet import alexnet
from podscale.jax.models.initialize import initialise
from podscale.jax.models.layers import (
    Arrays,
    ConvolutionFunction,
    LayerApplier,
    LayerOptions,
    StemCompute,
    choose_convolution,
    xla_convolution,
)
from podscale.jax.models.resnet import resnet


class ApplyFunction(Protocol):
    """Forward pass: `images` float [n, height, width, 3] -> (logits fp32 [n, classes], running statistics).

    In training the statistics follow the batch; else they stay as they are. The key is dropout's.
    """

    def __call__(
        self, parameters: Arrays, statistics: Arrays, images: Array, *, train: bool, key: Array | None = None
    ) -> tuple[Array, dict[str, Array]]: ...


def build_model(
    model: ModelSection,
    *,
    norm: BatchNorm | None = None,
    dtype: DTypeLike = jnp.float32,
    stem: StemCompute = "plain",
    convolve: ConvolutionFunction = xla_convolution,
    parts: spatial.Parts = (1, 1),
) -> ApplyFunction:
    """Build the network of a document's model section. All arrays are fp32; for the options see `LayerOptions`.

    Args:
        norm: default: statistics over the batch.
        parts: tiles per image. If not (1, 1), images are this device's tiles, inside `shard_map`.
    """
    norm = norm or BatchNorm(model.batch_norm.eps, model.batch_norm.momentum)
    options = LayerOptions(norm, dtype, stem, convolve)

    def apply(
        parameters: Arrays, statistics: Arrays, images: Array, *, train: bool, key: Array | None = None
    ) -> tuple[Array, dict[str, Array]]:
        def network(images: Array, tiles: spatial.TilesOf, train: bool = False) -> tuple[Array, dict[str, Array]]:
            layers = LayerApplier(parameters, statistics, options, train=train, tiles=tiles)
            if model.name == models.ALEXNET:
                return alexnet(layers, images, model, key if train else None), layers.statistics
            return resnet(layers, images, model), layers.statistics

        tiles = spatial.no_tiles if parts == (1, 1) else spatial.track_tiles(network, images, parts)
        return network(images, tiles, train)

    return apply


__all__ = ["ApplyFunction", "Arrays", "StemCompute", "build_model", "choose_convolution", "initialise"]
