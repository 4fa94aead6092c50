"""What an update rule is given and what it returns.

What one device updates: all weights, or its shard of every bucket.

An update rule never knows whether the update is sharded: it sees buckets of rows, each row within one array, and asks
here for the norms of whole arrays and for factors of arrays row by row. Where the update is sharded, the sums of
squares of all arrays are added over the devices in one small message (Kumar 2019; Xu 2020).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podscale.jax.flat_buffers import ROW_ELEMENTS, Buckets, ParamLayout
from podscale.jax.mesh import AxisNames
from podscale.training.param_layout import ParamOptions


class ParamShard:
    """axes, shards: of the mesh along which buckets are scattered; none and 1 where every device updates everything.

    With axes, to be made and used inside `shard_map`.
    """

    def __init__(
        self, layout: ParamLayout, treatments: Mapping[str, ParamOptions], axes: AxisNames = (), shards: int = 1
    ) -> None:
        self._axes = axes
        treated = [treatments[name] for name in layout.shapes]
        self.uses_weight_decay = jnp.array([float(treatment.uses_weight_decay) for treatment in treated])
        """1 for each array that decays, else 0."""
        self.uses_trust_ratio = jnp.array([treatment.uses_trust_ratio for treatment in treated])
        self._rows = [jnp.asarray(rows) for rows in layout.array_of_rows()]
        if axes:
            place = lax.axis_index(axes)
            self._rows = [lax.dynamic_slice_in_dim(r, place * (len(r) // shards), len(r) // shards) for r in self._rows]

    def norms(self, finite: Array, *values: Buckets) -> tuple[Array, list[Array]]:
        """Whether all devices are `finite`, and for each of the values the Euclidean norm of every array."""
        squares = [self._squares(buckets) for buckets in values]
        finite, squares = self.sum_over_devices(finite, squares)
        return finite, [jnp.sqrt(square) for square in squares]

    def sum_over_devices(self, finite: Array, sums: Sequence[Array] = ()) -> tuple[Array, list[Array]]:
        """Whether all devices are `finite`, and sums [arrays] added over them, in one message."""
        if not self._axes:
            return finite, list(sums)
        bad = jnp.where(finite, 0.0, 1.0)[None]
        total = lax.psum(jnp.concatenate([bad, *sums]), self._axes)
        # A sum of rows that are not finite may be NaN; the flag is an element of its own.
        return total[0] == 0.0, list(total[1:].reshape(len(sums), -1)) if sums else []

    def per_row(self, factor: Array) -> list[Array]:
        """A factor for all, or one for each array, as what multiplies the rows of each bucket."""
        if factor.ndim == 0:
            return [factor] * len(self._rows)
        return [jnp.take(factor, rows)[:, None] for rows in self._rows]

    def _squares(self, buckets: Buckets) -> Array:
        """The sum of squares of every array; rows first, then the rows of an array, which keeps fp32 sums short."""
        numbers = np.arange(len(self.uses_weight_decay), dtype=np.int32)
        total = jnp.zeros(len(numbers))
        for rows, bucket in zip(self._rows, buckets, strict=True):
            of_rows = jnp.square(as_rows(bucket)).sum(1)
            total += jnp.where(rows[:, None] == numbers, of_rows[:, None], 0.0).sum(0)
        return total


def as_rows(bucket: Array) -> Array:
    """A flat bucket as its rows."""
    return bucket.reshape(-1, ROW_ELEMENTS)


class HyperParams(NamedTuple):
    """One row of the schedule table (`schedules.COLUMNS`): fp32 scalars on the device."""

    learning_rate: Array
    momentum: Array
    weight_decay: Array


class OptState(NamedTuple):
    """What a rule keeps from update to update, by name.

    moments: of every weight, fp32 buckets of the share. scalars: fp32, equal on all devices.
    """

    moments: dict[str, Buckets]
    scalars: dict[str, Array]


class UpdateResult(NamedTuple):
    """Weights and what is kept after an update, and whether it was carried out, alike on all devices."""

    weights: Buckets
    opt_state: OptState
    finite: Array


class UpdateRule(Protocol):
    """One update of a device's share of the weights, as a pure function.

    weights and gradients are fp32 buckets of the share. `finite` says whether all averages that this device holds are;
    where it is False on any device, weights and what is kept stay as they are on every device, to the bit.
    """

    def __call__(
        self,
        shard: ParamShard,
        weights: Buckets,
        gradients: Buckets,
        opt_state: OptState,
        hyper: HyperParams,
        finite: Array,
    ) -> UpdateResult: ...
