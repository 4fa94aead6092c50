"""The layers that networks are made of, over arrays by the catalogue's names."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from podscale.jax.batchnorm import BatchNorm, Statistics
from podscale.jax.models.stem import NHWC_OIHW, StemCompute, stem_convolution

Arrays = Mapping[str, Array]


class Layers:
    """The layers of one forward pass: finds their arrays by name and gathers new running statistics.

    Images, filters and linear weights are computed with in `dtype`; batch norm's parameters and statistics are fp32.
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
    ) -> None:
        self._parameters, self._norm, self._train, self._dtype, self._stem = parameters, norm, train, dtype, stem
        self.statistics = dict(statistics)

    def stem(self, name: str, images: Array, *, stride: int, padding: int) -> Array:
        """The first convolution: images [n, height, width, 3] of any float type."""
        weight = self._parameters[f"{name}.weight"].astype(self._dtype)
        y = stem_convolution(images.astype(self._dtype), weight, stride, padding, self._stem)
        return self._biased(name, y)

    def convolution(self, name: str, x: Array, *, stride: int = 1, groups: int = 1) -> Array:
        """With same padding."""
        weight = self._parameters[f"{name}.weight"].astype(self._dtype)
        padding = weight.shape[-1] // 2
        y = lax.conv_general_dilated(
            x,
            weight,
            (stride, stride),
            [(padding, padding)] * 2,
            dimension_numbers=NHWC_OIHW,
            feature_group_count=groups,
        )
        return self._biased(name, y)

    def norm(self, name: str, x: Array) -> Array:
        """Batch norm, in training by the batch's statistics, which also move the running ones."""
        weight, bias = (self._parameters[f"{name}.{part}"] for part in ("weight", "bias"))
        mean, var = f"{name}.running_mean", f"{name}.running_var"
        running = Statistics(self.statistics[mean], self.statistics[var])
        if not self._train:
            return self._norm.evaluate(x, weight, bias, running)
        y, moved = self._norm.train(x, weight, bias, running)
        self.statistics[mean], self.statistics[var] = moved
        return y

    def linear(self, name: str, x: Array) -> Array:
        """[n, inputs] -> fp32 [n, outputs]: products in the dtype of the network, sums and bias in fp32 (or fp64)."""
        weight = self._parameters[f"{name}.weight"].astype(self._dtype)
        exact = jnp.promote_types(self._dtype, jnp.float32)
        y = jnp.dot(x.astype(self._dtype), weight.T, preferred_element_type=exact)
        return y + self._parameters[f"{name}.bias"]

    def _biased(self, name: str, y: Array) -> Array:
        bias = self._parameters.get(f"{name}.bias")
        return y if bias is None else y + bias.astype(y.dtype)


def max_pool(x: Array, kernel: int, stride: int, padding: int) -> Array:
    """The largest value of each window of images [n, height, width, channels]."""
    around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    y: Array = lax.reduce_window(x, -jnp.inf, lax.max, (1, kernel, kernel, 1), (1, stride, stride, 1), around)
    return y
