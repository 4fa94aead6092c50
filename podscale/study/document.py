"""Study document: the base run, the variants and the grid applied to it, and the settings of the results."""

from collections.abc import Mapping
from itertools import product
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from podscale.config import RunConfig, loads
from podscale.config.document import format_overrides
from podscale.config.fields import Section, conflict_error
from podscale.study.criteria import CriterionSection, OptionValues, SelectionSection
from podscale.util.formatting import suggest_similar

RATE_OPTION = "train.schedule.learning_rate"
START_SECTION = "train.start_from"
START_OPTION = f"{START_SECTION}.run"
BATCH_OPTION = "train.global_batch"
MIN_SEEDS = 3
"""Fewest seeds of a study with criteria."""


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


class StudyDocument(Section):
    """Grid of runs that answers a question: each variant at each grid point, with each seed."""

    name: str = Field(
        ...,
        description="Name; the results are in <workspace>/studies/results/<name>.",
        pattern=r"^[a-z][-a-z0-9]{0,59}$",
    )
    title: str = Field("", description="Heading of the results; default: the name.")
    question: str = Field("", description="Question and method; shown before the results.")
    reading: str = Field("", description="Interpretation by a person; shown after the results.")
    run: str | OptionValues = Field(
        ..., description="Run to vary: a preset, a path (relative to this file), or a document."
    )
    set: OptionValues = Field({}, description="Options of every trial, on top of the run.")
    variants: tuple[Variant, ...] = Field((Variant(name="as it is"),), min_length=1)
    pretraining: tuple[PretrainingSection, ...] = Field(
        (), description="Trainings that variants start from; the results do not compare them."
    )
    grid: dict[str, tuple[Any, ...]] = Field({}, description="Values by dotted option; all combinations run.")
    seeds: tuple[int, ...] = Field((1, 2, 3), min_length=1, description="Values of run.seed.")
    papers: tuple[str, ...] = Field((), description="Papers whose claim the study tests, such as `You 2017`.")
    selection: SelectionSection | None = Field(
        None, description="Selection of the options in each variant's `search`, before its seeds run."
    )
    criteria: tuple[CriterionSection, ...] = Field((), description="Pass criteria, written before the run.")
    passes: Literal["all", "any"] = Field("all", description="Criteria that must pass for the study to pass.")
    provenance: ProvenanceSection | None = None
    learning_rate: RateSection | None = Field(None, description="Learning rate; default: the run's.")
    choose: Literal["accuracy", "updates"] = Field(
        "accuracy", description="Criterion of a sweep: the best last top-1, or the fewest steps to the target."
    )
    target: float | None = Field(
        None, description="Top-1, as a fraction, to which epochs and steps are counted.", gt=0, lt=1
    )
    x: str | None = Field(None, description="Option of the grid on the horizontal axis; default: the first.")
    time_box_minutes: float | None = Field(
        None, description="Time box, minutes; no trial starts that would end later.", gt=0
    )
    cell_seconds: float | None = Field(None, description="Estimated seconds of a trial until one is measured.", gt=0)

    @model_validator(mode="after")
    def _check_document(self) -> "StudyDocument":
        names = [variant.name for variant in self.variants]
        if len(set(names)) < len(names):
            raise conflict_error("variants", "two have the same name")
        if len(set(self.seeds)) < len(self.seeds):
            raise conflict_error("seeds", "a seed is given twice", got=self.seeds)
        for field, values in self.grid.items():
            if not values or len(set(map(repr, values))) < len(values):
                raise conflict_error(f"grid.{field}", "needs values, each once", got=values)
        sections: list[Variant | PretrainingSection] = [*self.variants, *self.pretraining]
        for name in [*self.grid, *self.set, *(name for section in sections for name in section.set)]:
            if name in ("run.id", "run.seed"):
                raise conflict_error(name, "set by the study itself")
        if self.x is not None and self.x not in self.grid:
            raise conflict_error("x", f"not in the grid ({', '.join(self.grid) or 'which is empty'})", got=self.x)
        if self.choose == "updates" and self.target is None:
            raise conflict_error("target", "missing, and choose=updates needs it")
        self._check_rates(names)
        self._check_pretraining(names)
        self._check_selection(names)
        self._check_criteria(names)
        return self

    def _check_pretraining(self, names: list[str]) -> None:
        """Check that every `start_from` is a pretraining of the study, and that every pretraining is used."""
        known = [section.name for section in self.pretraining]
        for number, name in enumerate(known):
            if name in [*known[:number], *names]:
                raise conflict_error("pretraining", "two parts of the study have this name", got=name)
            if name not in [variant.start_from for variant in self.variants]:
                raise conflict_error("pretraining", "no variant starts from it", got=name, hint="Set start_from.")
        for variant in self.variants:
            if variant.start_from is None:
                continue
            if variant.start_from not in known:
                hint = suggest_similar(variant.start_from, known) or f"The study has: {', '.join(known) or 'none'}."
                raise conflict_error(
                    "start_from", f"no pretraining, for {variant.name}", got=variant.start_from, hint=hint
                )
            for name in [*variant.set, *variant.search, *self.grid, *(self.selection.set if self.selection else ())]:
                if name == START_SECTION or name.startswith(f"{START_SECTION}."):
                    raise conflict_error(name, f"{variant.name} starts from {variant.start_from}", hint="Remove one.")

    def _check_selection(self, names: list[str]) -> None:
        """Check that all searches have equally many candidates, and that every reference is to a search."""
        searching = {variant.name: len(variant.candidates) for variant in self.variants if variant.search}
        if searching and self.selection is None:
            raise conflict_error("selection", "missing, and a variant has a search")
        if len(set(searching.values())) > 1:
            counts = ", ".join(f"{name} {count}" for name, count in searching.items())
            problem = f"the variants try different numbers of candidates ({counts})"
            raise conflict_error("variants.search", problem, hint="Give every search the same number.")
        for variant in self.variants:
            if variant.search_of is not None and variant.search_of not in searching:
                raise conflict_error(
                    "search_of", f"not a variant with a search, for {variant.name}", got=variant.search_of
                )
            if (variant.search or variant.search_of) and self.rate_of(variant) is not None:
                raise conflict_error("learning_rate", f"{variant.name} has a search too", hint="Search the rate.")
            for option in variant.search:
                if option in self.grid:
                    raise conflict_error(f"search.{option}", "varied by the grid as well", hint="Remove one.")

    def _check_criteria(self, names: list[str]) -> None:
        if self.criteria and len(self.seeds) < MIN_SEEDS:
            raise conflict_error("seeds", f"criteria need at least {MIN_SEEDS}", got=self.seeds)
        if self.criteria and any((rate := self.rate_of(one)) and rate.sweep for one in self.variants):
            hint = "Use `search`, whose trials are judged by other images than the results."
            raise conflict_error("learning_rate.sweep", "not together with criteria", hint=hint)
        for criterion in self.criteria:
            for name in (criterion.variant, *criterion.others):
                if name not in names:
                    raise conflict_error("criteria", f"unknown variant, in {criterion.name}", got=name)
            for option, value in [*criterion.at.items(), *criterion.than_at.items()]:
                if value not in self.grid.get(option, ()):
                    raise conflict_error("criteria.at", f"{option} is not in the grid, in {criterion.name}", got=value)

    def _check_rates(self, names: list[str]) -> None:
        """Check that every chain of `at` references ends at a variant with a rate of its own."""
        for variant in self.variants:
            seen, rate = [variant.name], self.rate_of(variant)
            while rate is not None and isinstance(rate.at, str):
                if rate.at not in names:
                    raise conflict_error("learning_rate.at", f"unknown variant, for {seen[-1]}", got=rate.at)
                if rate.at in seen:
                    circle = " -> ".join([*seen, rate.at])
                    raise conflict_error("learning_rate.at", f"circular reference {circle}", got=rate.at)
                seen.append(rate.at)
                rate = self.rate_of(self.variant(rate.at))
            if len(seen) > 1 and rate is None:
                raise conflict_error(
                    "learning_rate.at", f"{seen[-1]} has no rate for {seen[-2]} to follow", got=seen[-1]
                )

    @property
    def axis_option(self) -> str | None:
        """Option on the horizontal axis; None without a grid."""
        return self.x or next(iter(self.grid), None)

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)

    def criterion_points(self, criterion: CriterionSection) -> tuple[OptionValues, OptionValues]:
        """Return the grid points of both sides of a criterion; an option that it leaves out is at its last value."""
        last = {option: values[-1] for option, values in self.grid.items()}
        return {**last, **criterion.at}, {**last, **(criterion.than_at or criterion.at)}

    def rate_of(self, variant: Variant) -> RateSection | None:
        return variant.learning_rate or self.learning_rate

    def config(self, settings: Mapping[str, Any]) -> RunConfig:
        """Return the run document with these settings on top of the study's. Raises InputError if it is not valid."""
        assert not isinstance(self.run, str), "read_study replaces the name by the document"
        base = [*format_overrides(self.run), *format_overrides(self.set), *format_overrides(settings)]
        return loads("{}", f"study {self.name}", base)
