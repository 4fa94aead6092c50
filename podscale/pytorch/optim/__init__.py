"""Update rules by their names in the document."""

from torch import nn

from podscale import models
from podscale.config.model import OptimizerSection
from podscale.pytorch.optim.base import Hyper, Optimizer, Slot
from podscale.pytorch.optim.lars import Lars
from podscale.pytorch.optim.sgd import Sgd


def build_optimizer(section: OptimizerSection, model: nn.Module, spec: models.ModelSpec) -> Optimizer:
    """The update rule of a document's optimizer section over the model's parameters, in the model's order."""
    roles = {parameter.name: parameter.role for parameter in spec.parameters}
    slots = []
    for name, parameter in model.named_parameters():
        regular = section.decay_all or roles[name] == "weight"
        slots.append(Slot(name, parameter, decays=regular, adapts=regular))
    match section.name:
        case "sgd":
            return Sgd(slots, nesterov=section.nesterov)
        case "lars":
            return Lars(slots, nesterov=section.nesterov, trust_coefficient=section.trust_coefficient, eps=section.eps)


__all__ = ["Hyper", "Lars", "Optimizer", "Sgd", "Slot", "build_optimizer"]
