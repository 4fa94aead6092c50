"""The options of the Neumann optimizer (Krishnan 2018)."""

from typing import Literal

from pydantic import model_validator

from podscale.config.conflict import conflict_error
from podscale.config.fields import result_field
from podscale.config.section import Section


class NeumannSection(Section):
    """Table 1 of the paper, and what its algorithm 2 leaves open. See docs/optimizers.md."""

    alpha: float = result_field(
        1e-7, "Pull towards the running average of the weights: alpha x distance squared.", ge=0
    )
    beta: float = result_field(
        1e-5,
        "Push away from it: beta x number of variables / distance squared; 0 with `alpha` 0: no regulariser.",
        ge=0,
    )
    gamma: float = result_field(0.99, "Decay of that average at each update.", ge=0, lt=1)
    momentum_start: float = result_field(0.5, "Lowest momentum.", ge=0, lt=1)
    momentum_end: float = result_field(0.9, "Highest momentum.", ge=0, lt=1)
    momentum_time: Literal["updates", "since_reset", "epochs"] = result_field(
        "updates",
        "What t counts in the momentum 1 - 1 / (1 + t) between those two: updates since the SGD phase, updates since "
        "the last reset, or epochs since the SGD phase (the paper says no more than t).",
    )
    sgd_epochs: float = result_field(5.0, "Plain SGD this long before the method begins.", ge=0)
    reset_epochs: float = result_field(10.0, "First time between two resets of the momentum; doubled after each.", gt=0)
    on_reset: Literal["hold", "move"] = result_field(
        "hold",
        "`hold`: a reset sets the momentum alone, weights and average stay. `move`: they move, as in other updates.",
    )
    moves_by: Literal["current", "previous"] = result_field(
        "current", "Momentum by which line 11 moves the weights: of this update (ICLR), or the last (arXiv, as quoted)."
    )

    @model_validator(mode="after")
    def _holds_together(self) -> "NeumannSection":
        if self.momentum_start > self.momentum_end:
            raise conflict_error(
                "momentum_start", f"above momentum_end {self.momentum_end}, to which it rises", got=self.momentum_start
            )
        if self.beta > 0 and self.sgd_epochs == 0:
            raise conflict_error(
                "sgd_epochs",
                "without a phase of SGD the weights begin on their average, and the push of beta has no direction and "
                "no bound",
                got=0,
                hint="Set sgd_epochs above 0, or beta to 0.",
            )
        return self
