"""Optimizer protocol, hyperparameters and state, and the parameter shard that a device steps.

An optimizer does not depend on whether the step is sharded: it sees buckets of rows, each row within one array, and
asks the shard for norms of whole arrays and for factors of arrays row by row. If the step is sharded, the sums of
squares of all arrays are added over the devices in one small message (Kumar 2019; Xu 2020).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from podscale.jax.flat_buffers import ROW_ELEMENTS, Buckets, ParamLayout, Values
from podscale.jax.mesh import AxisNames
from podscale.training.param_layout import ParamOptions


class ParamShard:
    """Parameters that a device steps. With axes, build and use it inside `shard_map`.

    Args:
        options: optimizer options of each array by name.
        axes: mesh axes along which buckets are scattered; none if every device steps all weights.
        shards: number of shards; 1 if every device steps all weights.
        norms: names of batch norm's arrays.
    """

    def __init__(
        self,
        layout: ParamLayout,
        options: Mapping[str, ParamOptions],
        axes: AxisNames = (),
        shards: int = 1,
        norms: Collection[str] = (),
    ) -> None:
        self._axes = axes
        self.layout = layout
        self.num_parameters = sum(map(prod, layout.shapes.values()))
        """Number of weights of all devices."""
        self.is_batch_norm = jnp.array([name in norms for name in layout.shapes])
        ordered = [options[name] for name in layout.shapes]
        self.uses_weight_decay = jnp.array([float(option.uses_weight_decay) for option in ordered])
        """1 for each array that decays, else 0."""
        self.uses_trust_ratio = jnp.array([option.uses_trust_ratio for option in ordered])
        self.trust_ratio_names = {name for name in layout.shapes if options[name].uses_trust_ratio}
        """Names of the arrays of `uses_trust_ratio`, known while the program is traced."""
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

    def sum_products(self, finite: Array, *pairs: tuple[Buckets, Buckets]) -> tuple[Array, list[Array]]:
        """Return True if all devices are `finite` (bool scalar), and the dot product of each of the `pairs`.

        Rows are summed first, which keeps fp32 sums short.
        """
        sums = [
            jnp.stack([(as_rows(x) * as_rows(y)).sum(1).sum() for x, y in zip(a, b, strict=True)]).sum()
            for a, b in pairs
        ]
        finite, (total,) = self.sum_over_devices(finite, [jnp.stack(sums)])
        return finite, list(total)

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


def scale_arrays(shard: ParamShard, buckets: Buckets, factor: Array) -> Buckets:
    """Multiply `buckets` by `factor`, a scalar or [arrays]."""
    factors = shard.per_row(factor)
    return tuple((row_factors * as_rows(b)).reshape(-1) for b, row_factors in zip(buckets, factors, strict=True))


def choose_finite(finite: Array, new: Buckets, old: Buckets) -> Buckets:
    """Return `new` if `finite` (bool scalar), else `old`."""
    return tuple(jnp.where(finite, a, b) for a, b in zip(new, old, strict=True))


class HyperParams(NamedTuple):
    """Hyperparameters of one step: scalars on the device, equal on all devices.

    The first three are a row of the schedule table (`schedules.COLUMNS`), fp32. `loss` is the mean loss over the global
    batch, nats, fp32; it may be non-finite if the gradient is. `step` counts from 0, masked steps included, int32.
    """

    learning_rate: Array
    momentum: Array
    weight_decay: Array
    loss: Array
    step: Array


class OptState(NamedTuple):
    """Optimizer state by name.

    Args:
        moments: state per weight, fp32 buckets of the shard.
        scalars: fp32 scalars, equal on all devices.
        extra: state in its own shapes (see `ExtraStateLayout`).
    """

    moments: dict[str, Buckets]
    scalars: dict[str, Array]
    extra: Mapping[str, Array] = {}


class OptimizerResult(NamedTuple):
    """Weights and optimizer state after a step, and whether it was applied, the same on all devices."""

    weights: Buckets
    opt_state: OptState
    finite: Array


class ExtraStateLayout(Protocol):
    """Layout of optimizer state that is not per weight: on the devices, and in a checkpoint, for any mesh."""

    @property
    def specs(self) -> Mapping[str, PartitionSpec]:
        """Sharding of each array on the devices, by name."""
        ...

    def initial(self) -> dict[str, Values]:
        """Return the state before the first step, by its names in a checkpoint."""
        ...

    def pack(self, named: Mapping[str, Values]) -> dict[str, Values]:
        """Return the unsharded arrays of the devices from those of a checkpoint."""
        ...

    def unpack(self, arrays: Mapping[str, Values]) -> dict[str, Values]:
        """Return the arrays of a checkpoint: the inverse of `pack`."""
        ...


@runtime_checkable
class LookaheadOptimizer(Protocol):
    """Optimizer whose stored weights are the point of the next gradient, not the result."""

    def evaluation_weights(self, weights: Buckets, opt_state: OptState) -> Buckets:
        """Return the result, to evaluate and export."""
        ...


class Optimizer(ABC):
    """One optimizer step of a device's shard of the weights, as a pure function. Its hyperparameters are fields."""

    extra_layout: ExtraStateLayout | None = None
    """State that is not per weight."""

    @property
    def initial_scalars(self) -> Mapping[str, float]:
        """Initial value of each scalar of the state, by name."""
        return {}

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


def exact_product(a: Array, b: Array) -> Array:
    """Return `a` @ `b`, [n, rows, columns] of one dtype, without a TPU's rounding of fp32 to bf16."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
