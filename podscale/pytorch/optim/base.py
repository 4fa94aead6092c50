"""Optimizer protocols and hyperparameters, and the group of ranks that step the same weights."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from podscale.pytorch.all_reduce.collectives import all_gather_tensor
from podscale.pytorch.world import World

SMALL_SUM_VALUES = 2**17
"""Number of values up to which an fp32 sum is as accurate as their rounding (1e-9 of the sum of magnitudes)."""


class HyperParams(NamedTuple):
    """Hyperparameters of one step: fp32 scalars on the device, equal on all ranks.

    The first three are a row of the schedule table (`schedules.COLUMNS`); `momentum` is beta 1 of Adam and LAMB. `loss`
    is the mean loss over the global batch, nats, and may be non-finite if the gradient is. No host value in a step
    changes from step to step, so that a CUDA graph can hold the whole step.
    """

    learning_rate: Tensor
    momentum: Tensor
    weight_decay: Tensor
    loss: Tensor


class Optimizer(Protocol):
    """Steps this rank's weights on the device, without waiting for it."""

    moments: dict[str, Tensor]
    """State per weight by name: fp32, in the order of the shard (see `ParamShard.zeros`)."""
    scalars: dict[str, Tensor]
    """Scalar state by name: fp32, equal on all ranks."""

    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        """Run one step. Returns True if it was applied (bool scalar), the same on all ranks. Overwrites the gradients.

        Args:
            finite: bool scalar; False if a gradient on this rank is not finite, after the caller has zeroed them. If
                it is False on any rank, weights and moments stay unchanged on every rank, to the bit.
        """
        ...


@runtime_checkable
class ExtraStateOptimizer(Protocol):
    """Optimizer with state that is not per weight, in its own shapes."""

    @property
    def extra_state_bytes(self) -> int:
        """Bytes of this state on this rank."""
        ...

    def extra_state_arrays(self) -> dict[str, Tensor]:
        """Return the unsharded state by name: fp32, the same on all ranks and for any world size. All ranks call it."""
        ...

    def load_extra_state(self, arrays: Mapping[str, Tensor]) -> None:
        """Load `arrays`, as `extra_state_arrays` returned them, possibly at another world size."""
        ...


@runtime_checkable
class StepAware(Protocol):
    """Optimizer, or other part of a step, whose work differs between steps, which a CUDA graph cannot hold."""

    def start_step(self, step: int) -> None:
        """Prepare step `step`, from 0, on the host. Masked steps count."""
        ...


@runtime_checkable
class LookaheadOptimizer(Protocol):
    """Optimizer whose stored weights are the point of the next gradient, not the result."""

    def evaluation_weights(self) -> Tensor:
        """Return the result, to evaluate and export: fp32, in the order of the shard."""
        ...


def where_finite(finite: Tensor, factor: Tensor | float, otherwise: float) -> Tensor:
    """Return `factor` if `finite` (bool scalar), else `otherwise`, with which a masked step changes nothing."""
    return torch.where(finite, factor, otherwise)


def copy_where_finite(finite: Tensor, target: Tensor, value: Tensor) -> None:
    """Copy `value` into `target` if `finite` (bool scalar); else leave `target` unchanged, to the bit."""
    target.copy_(torch.where(finite, value, target))


def dot_fp64(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot product of `a` and `b`, of one shape, in fp64, to the rounding of each fp32 product."""
    return sum_fp64(a * b)


def sum_fp64(values: Tensor) -> Tensor:
    """Return the sum of fp32 `values` as an fp64 scalar.

    Up to `SMALL_SUM_VALUES` values on a CPU are summed in fp32. torch adds in a tree there, which is as accurate in a
    third of the time.
    """
    is_small = values.device.type == "cpu" and values.numel() <= SMALL_SUM_VALUES
    return values.sum().double() if is_small else values.sum(dtype=torch.float64)


class ReplicaGroup(NamedTuple):
    """Ranks that hold the same weights and may share work; `all_gather` concatenates their equally long vectors."""

    rank: int = 0
    size: int = 1
    all_gather: Callable[[Tensor], Tensor] = lambda local: local


def build_replica_group(world: World) -> ReplicaGroup:
    def gather(local: Tensor) -> Tensor:
        gathered = local.new_empty(world.size * len(local))
        all_gather_tensor(gathered, local)
        return gathered

    return ReplicaGroup(world.rank, world.size, gather) if world.size > 1 else ReplicaGroup()
