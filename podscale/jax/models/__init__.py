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
    StemCompute,
    choose_convolution,
    xla_convolution,
)
from podscale.jax.models.resnet import resnet


class ApplyFunction(Protocol):
    """A forward pass: images float [n, height, width, 3] -> logits fp32 [n, classes], and the running statistics.

    In training these have moved by one batch, else they are those given. key: of what a network draws (dropout).
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
    """The network of a document's model section.

    norm: how batch norm takes its statistics; default: over the batch. dtype: of activations and of the weights of
    convolutions and linear layers while they are computed with (bf16 as in Ying 2018); arrays are fp32 always.
    convolve: as the devices at hand do it well (`convolution_on`).
    parts: where not (1, 1), images are this device's tiles, inside `shard_map`; logits are those of whole images.
    """
    norm = norm or BatchNorm(model.batch_norm.eps, model.batch_norm.momentum)

    def apply(
        parameters: Arrays, statistics: Arrays, images: Array, *, train: bool, key: Array | None = None
    ) -> tuple[Array, dict[str, Array]]:
        def network(images: Array, tiles: spatial.TilesOf, train: bool = False) -> tuple[Array, dict[str, Array]]:
            layers = LayerApplier(
                parameters, statistics, norm, train=train, dtype=dtype, stem=stem, convolve=convolve, tiles=tiles
            )
            if model.name == models.ALEXNET:
                logits = alexnet(layers, images, model, key if train else None)
            else:
                logits = resnet(layers, images, model)
            return logits, layers.statistics

        tiles = spatial.no_tiles if parts == (1, 1) else spatial.track_tiles(network, images, parts)
        return network(images, tiles, train)

    return apply


__all__ = ["ApplyFunction", "Arrays", "StemCompute", "build_model", "choose_convolution", "initialise"]
