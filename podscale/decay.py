"""Which parameters an update decays, and whose rate it scales: what the optimizer section says of each by name."""

from fnmatch import fnmatchcase
from typing import NamedTuple

from podscale.config.optimizer import OptimizerSection
from podscale.errors import InputError
from podscale.models import ModelSpec


class ParamOptions(NamedTuple):
    """uses_weight_decay: whether weight decay applies. uses_trust_ratio: whether LARS and LAMB scale its rate."""

    uses_weight_decay: bool
    uses_trust_ratio: bool


def param_options(section: OptimizerSection, spec: ModelSpec) -> dict[str, ParamOptions]:
    """The treatment of each parameter, in the order of the model.

    Raises InputError where a pattern of the skip list matches nothing.
    """
    names = [parameter.name for parameter in spec.parameters]
    for pattern in section.skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"no parameter of {spec.name} has this name",
                field="train.optimizer.skip",
                got=pattern,
                hint=f"Names are such as {', '.join(names[-2:])}, and * stands for any text.",
            )
    found = {}
    for parameter in spec.parameters:
        taken = not any(fnmatchcase(parameter.name, pattern) for pattern in section.skip)
        decays = taken and (section.decay_all or parameter.role == "weight")
        found[parameter.name] = ParamOptions(decays, taken and (section.adapt_all or decays))
    return found
