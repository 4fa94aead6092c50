"""The section about a running average of the weights."""

from podscale.config.fields import result_field
from podscale.config.section import Section


class EmaSection(Section):
    """An exponential moving average of the weights, kept beside those that are trained."""

    decay: float | None = result_field(
        None,
        "Keep average = decay x average + (1 - decay) x weights, of the weights and of batch norm's running "
        "statistics; default: none is kept.",
        gt=0,
        lt=1,
    )
    every_steps: int = result_field(1, "Updates between two steps of that average.", ge=1)
