"""Optimizer protocol, hyperparameters and state, and the parameter shard that a device steps.

An optimizer does not depend on whether the step is sharded: it sees buckets of rows, each row within one array, and
asks the shard for norms of whole arrays and for factors of arrays row by row. If the step is sharded, the sums of
squares of all arrays are added over the devices in one small message (Kumar 2019; Xu 2020).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podscale.jax.flat_buffers import ROW_ELEMENTS, Buckets, ParamLayout
from podscale.jax.mesh import AxisNames
from podscale.training.param_layout import ParamOptions


class ParamShard:
    """Parameters that a device steps. With axes, build and use it inside `shard_map`.

    Args:
        options: optimizer options of each array by name.
        axes: mesh axes along which buckets are scattered; none if every device steps all weights.
        shards: number of shards; 1 if every device steps all weights.
    """

    def __init__(
        self, layout: ParamLayout, options: Mapping[str, ParamOptions], axes: AxisNames = (), shards: int = 1
    ) -> None:
        self._axes = axes
        ordered = [options[name] for name in layout.shapes]
        self.uses_weight_decay = jnp.array([float(option.uses_weight_decay) for option in ordered])
        """1 for each array that decays, else 0."""
        self.uses_trust_ratio = jnp.array([option.uses_trust_ratio for option in ordered])
        self._rows = [jnp.asarray(rows) for rows in layout.array_of_rows()]
        if axes:
            index = lax.axis_index(axes)
            self._rows = [lax.dynamic_slice_in_dim(r, index * (len(r) // shards), len(r) // shards) for r in self._rows]

    def norms(self, finite: Array, *values: Buckets) -> tuple[Array, list[Array]]:
        """Return True if all devices are `finite` (bool scalar), and for each of `values` the L2 norms [arrays]."""
        squares = [self._squares(buckets) for buckets in values]
        finite, squares = self.sum_over_devices(finite, squares)
        return finite, [jnp.sqrt(square) for square in squares]

    def sum_over_devices(self, finite: Array, sums: Sequence[Array] = ()) -> tuple[Array, list[Array]]:
        """Return True if all devices are `finite` (bool scalar), and `sums` [arrays] over them, in one message."""
        if not self._axes:
            return finite, list(sums)
        bad = jnp.where(finite, 0.0, 1.0)[None]
        total = lax.psum(jnp.concatenate([bad, *sums]), self._axes)
        # A sum of rows that are not finite may be NaN; the flag is an element of its own.
        return total[0] == 0.0, list(total[1:].reshape(len(sums), -1)) if sums else []

    def per_row(self, factor: Array) -> list[Array]:
        """Expand `factor`, a scalar or [arrays], to factors of the rows of each bucket."""
        if factor.ndim == 0:
            return [factor] * len(self._rows)
        return [jnp.take(factor, rows)[:, None] for rows in self._rows]

    def _squares(self, buckets: Buckets) -> Array:
        """Return the sum of squares of every array. Rows are summed first, which keeps fp32 sums short."""
        numbers = np.arange(len(self.uses_weight_decay), dtype=np.int32)
        total = jnp.zeros(len(numbers))
        for rows, bucket in zip(self._rows, buckets, strict=True):
            of_rows = jnp.square(as_rows(bucket)).sum(1)
            total += jnp.where(rows[:, None] == numbers, of_rows[:, None], 0.0).sum(0)
        return total


def as_rows(bucket: Array) -> Array:
    """View a flat `bucket` as rows, [rows, ROW_ELEMENTS]."""
    return bucket.reshape(-1, ROW_ELEMENTS)


class HyperParams(NamedTuple):
    """One row of the schedule table (`schedules.COLUMNS`): fp32 scalars on the device."""

    learning_rate: Array
    momentum: Array
    weight_decay: Array


class OptState(NamedTuple):
    """Optimizer state by name.

    Args:
        moments: state per weight, fp32 buckets of the shard.
        scalars: fp32 scalars, equal on all devices.
    """

    moments: dict[str, Buckets]
    scalars: dict[str, Array]


class OptimizerResult(NamedTuple):
    """Weights and optimizer state after a step, and whether it was applied, the same on all devices."""

    weights: Buckets
    opt_state: OptState
    finite: Array


class Optimizer(ABC):
    """One optimizer step of a device's shard of the weights, as a pure function. Its hyperparameters are fields."""

    scalar_names: tuple[str, ...] = ()
    """Names of the scalar state, which starts at 0."""

    @property
    def initial_moments(self) -> Mapping[str, float]:
        """Initial value of each moment, by name."""
        return {"momentum": 0.0}

    @abstractmethod
    def step(
        self,
        shard: ParamShard,
        weights: Buckets,
        gradients: Buckets,
        opt_state: OptState,
        hyper: HyperParams,
        finite: Array,
    ) -> OptimizerResult:
        """Return the state after one step. Weights and averaged gradients are fp32 buckets of the shard.

        Args:
            finite: bool scalar; False if an average on this device is not finite. If it is False on any device,
                weights and state stay unchanged on every device, to the bit.
        """
