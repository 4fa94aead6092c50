"""What an update rule is given and what it keeps.

The ranks that carry out the same whole update, for a rule that deals out work among them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.world import World

SMALL_SUM_VALUES = 2**17
"""So many values are added in fp32 to the accuracy of their own rounding (1e-9 of the sum of their sizes)."""


class HyperParams(NamedTuple):
    """What an update goes by beside the gradient: fp32 scalars on the device, equal on all ranks.

    The first three are a row of the schedule table (`schedules.COLUMNS`). loss: the mean over the global batch that the
    gradient is of, in nats; where the gradient is not finite, it need not be. Nothing in an update depends on a number
    of the host that changes from step to step, so that a CUDA graph can hold the whole of it.
    """

    learning_rate: Tensor
    momentum: Tensor
    weight_decay: Tensor
    loss: Tensor


class Optimizer(Protocol):
    """Updates this rank's share of the weights, on the device, without ever waiting for it."""

    moments: dict[str, Tensor]
    """What the rule keeps of every weight, by name: fp32, in the order of the share (see `Share.zeros`)."""
    scalars: dict[str, Tensor]
    """What it keeps besides: fp32 scalars, equal on all ranks."""

    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        """Carries out one update and uses up the gradients; returns whether it was carried out, alike on all ranks.

        `finite` (bool scalar) says whether all gradients that this rank has seen are; where it is False the caller
        has zeroed them. Where it is False on any rank, weights and moments stay as they are on every rank, to the bit.
        """
        ...


@runtime_checkable
class ExtraStateOptimizer(Protocol):
    """A rule that keeps more than values of single weights, in shapes of its own."""

    @property
    def extra_state_bytes(self) -> int:
        """What this rank keeps of it."""
        ...

    def extra_state_arrays(self) -> dict[str, Tensor]:
        """All of it by name, whole: fp32, in no way that depends on the ranks, and the same on all; all call it."""
        ...

    def load_extra_state(self, arrays: Mapping[str, Tensor]) -> None:
        """Takes over what `arrays` gave, perhaps on another number of ranks."""
        ...


@runtime_checkable
class StepAware(Protocol):
    """A rule that does more in some updates than in others, which a CUDA graph cannot."""

    def start_step(self, step: int) -> None:
        """Told by the host before update `step`, from 0; masked ones count."""
        ...


@runtime_checkable
class LookaheadOptimizer(Protocol):
    """A rule whose weights stand where its next gradient is taken, which is not the point that it has reached."""

    def evaluation_weights(self) -> Tensor:
        """The point reached, which is evaluated and exported: fp32, in the order of the share; changes nothing."""
        ...


def where_finite(finite: Tensor, factor: Tensor | float, otherwise: float) -> Tensor:
    """`factor` where the update is finite, else `otherwise`: fp32 on the device."""
    return torch.where(finite, factor, otherwise)


def copy_where_finite(finite: Tensor, kept: Tensor, value: Tensor) -> None:
    """Takes over `value` where the update is finite; leaves what is kept to the bit where it is not."""
    kept.copy_(torch.where(finite, value, kept))


def dot_fp64(a: Tensor, b: Tensor) -> Tensor:
    """The sum of the products, fp64, to the rounding of each fp32 product."""
    return sum_fp64(a * b)


def sum_fp64(values: Tensor) -> Tensor:
    """The sum in fp64. Of a few values on a CPU, where torch adds in a tree, fp32 is as good and takes a third of the
    time."""
    few = values.device.type == "cpu" and values.numel() <= SMALL_SUM_VALUES
    return values.sum().double() if few else values.sum(dtype=torch.float64)


class ReplicaGroup(NamedTuple):
    """This rank among them; all_gather: equally long vectors of all ranks, one after the other. Default: alone."""

    rank: int = 0
    size: int = 1
    all_gather: Callable[[Tensor], Tensor] = lambda own: own


def build_replica_group(world: World) -> ReplicaGroup:
    """All ranks of a world."""

    def gather(own: Tensor) -> Tensor:
        gathered = own.new_empty(world.size * len(own))
        dist.all_gather_into_tensor(gathered, own)
        return gathered

    return ReplicaGroup(world.rank, world.size, gather) if world.size > 1 else ReplicaGroup()
