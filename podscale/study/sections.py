"""Sections of a study document: variants, learning rates, pretraining, the selection of options, and pass criteria."""

from itertools import product
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from podscale.config.fields import Section, conflict_error

OptionValues = dict[str, Any]
"""Options of a run document by dotted name; a value may be a section, of which only the named options are set."""


class SweepSection(Section):
    """Learning rates around that of the rule or table, tried before all seeds run."""

    factors: tuple[float, ...] = Field(
        (0.5, 1.0, 2.0), description="Factors on the rate of the rule or table.", min_length=2
    )
    widen: int = Field(2, description="Maximal number of further rates, added while the best rate is at an edge.", ge=0)
    seeds: int = Field(1, description="Number of the study's seeds that each rate runs with; their mean decides.", ge=1)

    @field_validator("factors")
    @classmethod
    def _rise(cls, factors: tuple[float, ...]) -> tuple[float, ...]:
        if list(factors) != sorted(set(factors)) or factors[0] <= 0:
            raise ValueError("not positive and rising")
        return factors


class RateSection(Section):
    """Source of a trial's learning rate: a rule or a table, and a sweep around it."""

    at: float | str | None = Field(
        None, description="Learning rate at `batch`, or the name of a variant whose chosen rate is used."
    )
    batch: int | None = Field(None, description="Batch that `at` is for; default: each trial's own.", ge=1)
    rule: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="Scaling of the rate from `batch` to a trial's batch: none, in proportion, or by the square root.",
    )
    table: dict[int, float] = Field({}, description="Rates by batch, instead of `at` and `rule`.")
    sweep: SweepSection | None = Field(
        None, description="Try rates around that of the rule or table, and use the best."
    )

    @model_validator(mode="after")
    def _one_way(self) -> "RateSection":
        if (self.at is None) == (not self.table):
            raise conflict_error("at", "give either `at` or `table`")
        if self.rule != "none" and (self.at is None or self.batch is None):
            raise conflict_error("rule", "needs `at` and the `batch` that it is for", got=self.rule)
        rates = [*self.table.values(), *([self.at] if isinstance(self.at, float) else [])]
        if any(rate <= 0 for rate in rates):
            raise conflict_error("at" if self.table == {} else "table", "rates must be positive", got=min(rates))
        return self


class Variant(Section):
    """One line of the comparison: settings under a name."""

    name: str = Field(..., min_length=1, max_length=60)
    set: OptionValues = Field({}, description="Options of the variant, by dotted name.")
    start_from: str | None = Field(
        None, description="Pretraining whose model of the same seed the trials start from (`train.start_from.run`)."
    )
    learning_rate: RateSection | None = Field(None, description="Learning rate; default: the study's.")
    search: dict[str, tuple[Any, ...]] = Field(
        {}, description="Values to try by option, in all combinations; `selection` chooses among them."
    )
    search_of: str | None = Field(
        None, description="Variant whose chosen options this one uses too, instead of a search of its own."
    )

    @property
    def candidates(self) -> list[OptionValues]:
        """Return all combinations of the search's values, in the order of the document; empty without a search."""
        if not self.search:
            return []
        return [dict(zip(self.search, values, strict=True)) for values in product(*self.search.values())]

    @model_validator(mode="after")
    def _check_search(self) -> "Variant":
        for option, values in self.search.items():
            if not values or len(set(map(repr, values))) < len(values):
                raise conflict_error(f"search.{option}", "needs values, each once", got=values)
            if option in self.set:
                raise conflict_error(f"search.{option}", f"set by {self.name} as well", hint="Remove one.")
        if self.search and self.search_of is not None:
            raise conflict_error("search_of", f"{self.name} has a search of its own", got=self.search_of)
        return self


class PretrainingSection(Section):
    """Training whose model variants start from: once for each seed, before the trials that need it."""

    name: str = Field(..., min_length=1, max_length=60)
    set: OptionValues = Field({}, description="Options on top of the study's, by dotted name.")


class ProvenanceSection(Section):
    """Version of the document's file; `podscale study` fills it in."""

    file: str = Field("", description="Name of the file.")
    commit: str | None = Field(None, description="Last commit of the file; none if it differs from that or has none.")
    committed: str | None = Field(None, description="Date of that commit, ISO 8601.")


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
