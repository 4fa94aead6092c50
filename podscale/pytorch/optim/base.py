"""What an update rule is given and what it keeps."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Hyper(NamedTuple):
    """One row of the schedule table (`schedules.COLUMNS`): fp32 scalars on the device.

    Nothing in an update depends on a number of the host that changes from step to step, so that a CUDA graph can hold
    the whole of it.
    """

    learning_rate: Tensor
    momentum: Tensor
    weight_decay: Tensor


@dataclass
class Slot:
    """One parameter under its fp32 weight, whose `.grad` is the averaged fp32 gradient, and what a rule keeps of it.

    decays: whether weight decay applies. adapts: whether LARS scales its rate. momentum: fp32, laid out as the weight.
    """

    name: str
    weight: Tensor
    decays: bool
    adapts: bool
    momentum: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.momentum = torch.zeros_like(self.weight, dtype=torch.float32, memory_format=torch.preserve_format)

    @property
    def gradient(self) -> Tensor:
        assert self.weight.grad is not None, f"{self.name} has no gradient"
        return self.weight.grad


class Optimizer(Protocol):
    """Updates all parameters at once, on the device, without ever waiting for it."""

    slots: list[Slot]

    def step(self, hyper: Hyper, finite: Tensor) -> Tensor:
        """Carries out one update and uses up the gradients; returns whether it was carried out.

        `finite` is a bool scalar on the device. Where it is False the caller has zeroed the gradients, and the update
        leaves weights and momentum as they are, to the bit.
        """
        ...


def where_finite(finite: Tensor, factor: Tensor | float, otherwise: float) -> Tensor:
    """`factor` where the update is finite, else `otherwise`: a fp32 scalar on the device."""
    return torch.where(finite, factor, otherwise)
