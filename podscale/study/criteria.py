"""Sections of a study document that are written before the run: selection of options, and pass criteria."""

from typing import Any, Literal

from pydantic import Field, model_validator

from podscale.config.fields import Section, conflict_error

OptionValues = dict[str, Any]
"""Options of a run document by dotted name; a value may be a section, of which only the named options are set."""


class SelectionSection(Section):
    """Trials that choose each variant's options by `search`, on images that the results do not report."""

    set: OptionValues = Field(
        {"data.holdout_fraction": 0.1},
        description="Options of the selection's trials alone; they hold validation images out of the training split.",
    )
    seeds: tuple[int, ...] = Field(
        (101,), description="Seeds of the selection's trials; their mean decides.", min_length=1
    )


class CriterionSection(Section):
    """Comparison of a variant with another, over paired seeds, and the threshold at which it passes.

    The variants see the same number of training images, unless `budget` is `free`.
    """

    name: str = Field(..., min_length=1, max_length=80)
    variant: str = Field(..., description="Variant that the criterion is about.")
    than: str | tuple[str, ...] = Field(
        ..., description="Variant to compare with; of several, the best one by the selection."
    )
    at: OptionValues = Field({}, description="Grid point, by option; default: the last value of each option.")
    than_at: OptionValues = Field({}, description="Grid point of `than`; default: that of `at`.")
    measure: Literal["top1", "steps"] = Field(
        "top1",
        description="`top1`: difference of the last top-1, as a fraction. `steps`: steps at which the variant reaches "
        "the last top-1 of `than`, over the steps that `than` takes to it.",
    )
    above: float | None = Field(None, description="Passes if the whole 95 % interval is above this value.")
    below: float | None = Field(None, description="Passes if the whole 95 % interval is below this value.")
    equal: float | None = Field(
        None, description="Passes if the interval contains 0 and half of its width is at most this value.", gt=0
    )
    premise: bool = Field(False, description="Condition without which the other criteria decide nothing.")
    budget: Literal["equal", "free"] = Field(
        "equal", description="`equal`: refuse variants that train on different numbers of images."
    )

    @model_validator(mode="after")
    def _check_threshold(self) -> "CriterionSection":
        given = [name for name in ("above", "below", "equal") if getattr(self, name) is not None]
        if len(given) > 1:
            raise conflict_error(given[1], f"given together with {given[0]}", hint="Give one threshold.")
        if self.premise and not given:
            raise conflict_error("premise", "needs a threshold", hint="Set above, below or equal.")
        if self.measure == "steps" and self.equal is not None:
            raise conflict_error("equal", "a ratio of steps has no 0 to contain", hint="Set below.")
        return self

    @property
    def others(self) -> tuple[str, ...]:
        """Return the variants to compare with."""
        return (self.than,) if isinstance(self.than, str) else self.than

    @property
    def is_decisive(self) -> bool:
        """Return True if the criterion has a threshold and is no premise."""
        return not self.premise and (self.above, self.below, self.equal) != (None, None, None)
