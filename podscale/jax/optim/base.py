"""What an update rule is given and what it returns."""

from typing import NamedTuple, Protocol

from jax import Array

from podscale.jax.gradients import Buckets
from podscale.jax.optim.share import ParamShard


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
