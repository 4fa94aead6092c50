"""The sections about Adam and RMSProp, read where the optimizer is of that name."""

from typing import Literal

from podscale.config.fields import result_field
from podscale.config.section import Section


class AdamSection(Section):
    decoupled: bool = result_field(False, "Decay beside the gradient instead of in it (AdamW; Loshchilov 2019).")


class RmspropSection(Section):
    decay: float = result_field(0.9, "Decay of the average of squared gradients (Hinton 2012).", ge=0, lt=1)
    variant: Literal["torch", "tensorflow"] = result_field(
        "torch",
        "`torch`: the average begins at 0, and eps is added to its root. `tensorflow`: it begins at 1, and eps is "
        "added under the root; its momentum buffer holds the learning rate (set momentum_form=unscaled).",
    )
