"""What an update rule is given and what it keeps."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class Slot:
    """One parameter, whether weight decay (and LARS scaling) applies to it, and its momentum (fp32, same layout)."""

    name: str
    parameter: Tensor
    decays: bool
    momentum: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.momentum = torch.zeros_like(self.parameter, dtype=torch.float32, memory_format=torch.preserve_format)


class Optimizer(Protocol):
    """Updates all parameters at once, on the device, without ever waiting for it.

    `finite` is a bool scalar on the device. Where it is False the caller has zeroed the gradients, and the update
    leaves parameters and momentum as they are, to the bit.
    """

    slots: list[Slot]

    def step(self, gradients: list[Tensor], learning_rate: float, finite: Tensor) -> None: ...


def where_finite(finite: Tensor, factor: float, otherwise: float) -> Tensor:
    """`factor` where the update is finite, else `otherwise`: a fp32 scalar on the device."""
    return torch.where(finite, factor, otherwise)
