"""The layers that networks are made of, over arrays by the catalogue's names."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from podscale.jax import spatial
from podscale.jax.batchnorm import BatchNorm, ChannelStatistics
from podscale.jax.models.convolution import ConvolutionFunction, xla_convolution
from podscale.jax.models.stem import StemCompute, stem_convolution
from podscale.models import Window

Arrays = Mapping[str, Array]


class LayerApplier:
    """The layers of one forward pass: finds their arrays by name and gathers new running statistics.

    Images, filters and linear weights are computed with in `dtype`; batch norm's parameters and statistics are fp32.
    tiles: how the images of each operation are cut over devices (see `spatial`).
    """

    def __init__(
        self,
        parameters: Arrays,
        statistics: Arrays,
        norm: BatchNorm,
        *,
        train: bool,
        dtype: DTypeLike = jnp.float32,
        stem: StemCompute = "plain",
        convolve: ConvolutionFunction = xla_convolution,
        tiles: spatial.TilesOf = spatial.no_tiles,
    ) -> None:
        self._parameters, self._norm, self._train, self._dtype, self._stem = parameters, norm, train, dtype, stem
        self._convolve, self._tiles = convolve, tiles
        self.statistics = dict(statistics)

    def stem(self, name: str, images: Array, *, stride: int, padding: int) -> Array:
        """The first convolution: images [n, height, width, 3] of any float type."""
        weight = self._parameters[f"{name}.weight"].astype(self._dtype)
        x = images.astype(self._dtype)
        x, padding = spatial.exchange_halo(x, Window(weight.shape[-1], stride, padding), self._tiles(x))
        y = stem_convolution(x, weight, stride, padding, self._stem, self._convolve)
        return self._add_bias(name, y)

    def convolution(self, name: str, x: Array, *, stride: int = 1, groups: int = 1) -> Array:
        """With same padding."""
        weight = self._parameters[f"{name}.weight"].astype(self._dtype)
        kernel = weight.shape[-1]
        x, padding = spatial.exchange_halo(x, Window(kernel, stride, kernel // 2), self._tiles(x))
        return self._add_bias(name, self._convolve(x, weight, stride, padding, groups))

    def blur(self, x: Array) -> Array:
        """Each channel with [1, 2, 1] / 4 along both directions, zeros outside (Zhang 2019)."""
        x, padding = spatial.exchange_halo(x, Window(3, 1, 1), self._tiles(x))
        x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
        x = (x[:, :-2] + x[:, 2:]) / 4 + x[:, 1:-1] / 2
        return (x[:, :, :-2] + x[:, :, 2:]) / 4 + x[:, :, 1:-1] / 2

    def subsample(self, x: Array, stride: int) -> Array:
        """Every `stride`-th pixel along both directions."""
        x, _ = spatial.exchange_halo(x, Window(1, stride, 0), self._tiles(x))
        return x[:, ::stride, ::stride]

    def norm(self, name: str, x: Array) -> Array:
        """Batch norm, in training by the batch's statistics, which also move the running ones."""
        weight, bias = (self._parameters[f"{name}.{part}"] for part in ("weight", "bias"))
        mean, var = f"{name}.running_mean", f"{name}.running_var"
        running, tiles = ChannelStatistics(self.statistics[mean], self.statistics[var]), self._tiles(x)
        if not self._train:
            return self._norm.evaluate(x, weight, bias, running)
        y, moved = self._norm.train(x, weight, bias, running, tiles)
        self.statistics[mean], self.statistics[var] = moved
        return y

    def max_pool(self, x: Array, kernel: int, stride: int, padding: int) -> Array:
        """The largest value of each window."""
        return spatial.max_pool(x, Window(kernel, stride, padding), self._tiles(x))

    def global_average_pool(self, x: Array) -> Array:
        """The mean over the pixels of each image: fp32 (or fp64) [n, channels]."""
        return spatial.global_average_pool(x.astype(jnp.promote_types(x.dtype, jnp.float32)), self._tiles(x))

    def gather_tiles(self, x: Array) -> Array:
        """Images that are no longer cut."""
        return spatial.gather_tiles(x, self._tiles(x))

    def linear(self, name: str, x: Array) -> Array:
        """[n, inputs] -> fp32 [n, outputs]: products in the dtype of the network, sums and bias in fp32 (or fp64)."""
        weight = self._parameters[f"{name}.weight"].astype(self._dtype)
        exact = jnp.promote_types(self._dtype, jnp.float32)
        y = jnp.dot(x.astype(self._dtype), weight.T, preferred_element_type=exact)
        return y + self._parameters[f"{name}.bias"]

    def _add_bias(self, name: str, y: Array) -> Array:
        bias = self._parameters.get(f"{name}.bias")
        return y if bias is None else y + bias.astype(y.dtype)
