"""The options of preconditioned nonlinear conjugate gradient (Adya 2018)."""

from typing import Literal

from podscale.config.fields import result_field
from podscale.config.section import Section


class NlcgSection(Section):
    """What the authors' program leaves open; the defaults are its own. See docs/optimizers.md."""

    beta: Literal["fletcher_reeves", "polak_ribiere"] = result_field(
        "fletcher_reeves",
        "Share of the last direction in the next, within 0 and 1. `polak_ribiere` keeps one vector more.",
    )
    step: Literal["step", "online", "none"] = result_field(
        "step",
        "How the loss scales the learning rate. `step`: its running average against that of five updates ago. "
        "`online`: the loss of every update against its running average. `none`: not at all.",
    )
    tolerance: float = result_field(
        1.0, "Multiplies the rises of the loss that the table of `step` and `online` names.", gt=0
    )
    lars_coefficient: float = result_field(
        0.0, "Scale each layer's gradient in proportion to |w| / |g| first; 0 = not. The authors suggest 0.001.", ge=0
    )
    norm_gradient_scale: float = result_field(
        1.0, "Multiplies the gradients of batch norm's scale and shift; the authors' program offers 0.01.", gt=0, le=1
    )
    restart_every: int = result_field(0, "Updates after which the direction is the steepest again; 0 = never.", ge=0)
    forget_every: int = result_field(
        0, "Updates after which the preconditioner is the identity again; 0 = never.", ge=0
    )
