"""Update rules by their names in the document."""

from collections.abc import Sequence

from torch import nn

from podscale import models
from podscale.config.model import OptimizerSection
from podscale.pytorch.optim.base import Optimizer, Slot
from podscale.pytorch.optim.lars import Lars
from podscale.pytorch.optim.sgd import Sgd


def build_optimizer(section: OptimizerSection, model: nn.Module, spec: models.ModelSpec) -> Optimizer:
    """The update rule of a document's optimizer section over the model's parameters, in the model's order."""
    roles = {parameter.name: parameter.role for parameter in spec.parameters}
    slots: Sequence[Slot] = [
        Slot(name, parameter, decays=section.decay_all or roles[name] == "weight")
        for name, parameter in model.named_parameters()
    ]
    match section.name:
        case "sgd":
            return Sgd(slots, momentum=section.momentum, nesterov=section.nesterov, weight_decay=section.weight_decay)
        case "lars":
            return Lars(
                slots,
                momentum=section.momentum,
                nesterov=section.nesterov,
                weight_decay=section.weight_decay,
                trust_coefficient=section.trust_coefficient,
                eps=section.eps,
            )


__all__ = ["Lars", "Optimizer", "Sgd", "Slot", "build_optimizer"]
