"""Sweep series of a study, one variant at one grid point: the options it tries, then every seed with the chosen ones.

Everything here depends only on the document and the records so far.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Self

from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.study.document import RATE_OPTION, START_OPTION, StudyDocument
from podscale.study.records import GetRecord, TrialRecord
from podscale.study.sections import OptionValues, PretrainingSection, RateSection, Variant

GridPoint = tuple[tuple[str, Any], ...]
"""Point of the grid: (option, value) in the order of the document."""
BuildConfig = Callable[[OptionValues, int], RunConfig]
"""Builds a trial's run document from settings and seed."""


@dataclass(frozen=True)
class PlannedTrial:
    """Trial to run; until its learning rate is known, `config` has a placeholder rate.

    Args:
        series: Name of its sweep series.
        priority: 0 runs first; each further seed adds 1.
    """

    series: str
    seed: int
    priority: int
    config: RunConfig

    @property
    def order(self) -> tuple[int, float, float]:
        """Sort key: priority, then cheap trials first, by epochs and steps per epoch."""
        return self.priority, self.config.train.epochs, 1.0 / self.config.train.global_batch


@dataclass(frozen=True)
class Trial(PlannedTrial):
    """One run of a study.

    Args:
        settings: Options on top of the study's.
        choice: Those of them that the series tries or has chosen.
        pretraining: Trial whose model it starts from.
    """

    settings: OptionValues
    choice: OptionValues
    pretraining: "Trial | None" = None

    @property
    def key(self) -> str:
        return self.config.run.id

    @property
    def rate(self) -> float:
        return self.config.train.schedule.learning_rate

    @property
    def name(self) -> str:
        return f"{self.series}, {format_choice(self.choice or {RATE_OPTION: self.rate})}, seed {self.seed}"


@dataclass(frozen=True)
class SweepSeries:
    """One variant at one point of the grid; its learning rate or its choice follows from `depends_on`, if set.

    Its trials start from the model of the same seed of `pretraining`, if set.
    """

    study: StudyDocument
    variant: Variant
    point: GridPoint
    depends_on: "SweepSeries | None"
    build_config: BuildConfig
    pretraining: "PretrainingSeries | None" = None

    @property
    def name(self) -> str:
        values = (f"{short_option_name(name)} {format_option_value(value)}" for name, value in self.point)
        return ", ".join([self.variant.name, *values])

    @property
    def rate_section(self) -> RateSection | None:
        return self.study.rate_of(self.variant)

    @cached_property
    def settings(self) -> OptionValues:
        return {**self.variant.set, **dict(self.point)}

    @cached_property
    def config(self) -> RunConfig:
        """Run document with the first seed, at the document's own learning rate."""
        return self._trial({}, self.study.seeds[0], 0).config

    @property
    def batch(self) -> int:
        return self.config.train.global_batch

    @property
    def depth(self) -> int:
        """Number of waves of series before this one, whose rates or models it needs."""
        before = (series for series in (self.depends_on, self.pretraining) if series is not None)
        return max((series.depth + 1 for series in before), default=0)

    def check(self) -> None:
        """Raise InputError if this series cannot run, whatever rates are chosen."""
        section, batch, study = self.rate_section, self.batch, f"study {self.study.name}"
        if section is not None and section.table and batch not in section.table:
            raise InputError(
                f"no rate for this batch of {self.variant.name}; it has {', '.join(map(str, section.table))}",
                field="learning_rate.table",
                got=batch,
                location=study,
            )
        if section is not None and section.sweep is not None and section.sweep.seeds > len(self.study.seeds):
            raise InputError(
                f"more than the {len(self.study.seeds)} seeds of the study, for {self.variant.name}",
                field="learning_rate.sweep.seeds",
                got=section.sweep.seeds,
                location=study,
            )
        for candidate in self.variant.candidates:
            for trial in self.candidate_trials(candidate):
                if trial.config.data.holdout_fraction is None:
                    raise InputError(
                        "the selection would see the validation images of the results",
                        field="selection.set",
                        hint="Set data.holdout_fraction in it, such as 0.1.",
                        location=study,
                    )
        for name, _ in self.point:
            if name in self.variant.set:
                raise InputError(f"set by the grid and by {self.variant.name}", field=name, location=study)

    def rate_from_rule(self, get: GetRecord) -> float | None:
        """Return the rate by rule or table; None without one, or until the rate it depends on is known."""
        section = self.rate_section
        if section is None:
            return None
        if section.table:
            return section.table[self.batch]
        base = section.at if self.depends_on is None else self.depends_on.chosen_rate(get)
        if base is None:
            return None
        assert isinstance(base, float)
        times = 1.0 if section.batch is None else self.batch / section.batch
        return round_rate(base * {"none": 1.0, "linear": times, "sqrt": times**0.5}[section.rule])

    def sweep_rates(self, get: GetRecord) -> list[float]:
        """Return the rates to try, rising, that follow from the records so far; empty without a sweep."""
        section, centre = self.rate_section, self.rate_from_rule(get)
        if section is None or section.sweep is None or centre is None:
            return []
        rates = [round_rate(centre * factor) for factor in section.sweep.factors]
        for _ in range(section.sweep.widen):
            found = self._best([{RATE_OPTION: rate} for rate in rates], get)
            best = None if found is None else found[RATE_OPTION]
            if best == rates[0]:
                rates.insert(0, round_rate(rates[0] * rates[0] / rates[1]))
            elif best == rates[-1]:
                rates.append(round_rate(rates[-1] * rates[-1] / rates[-2]))
            else:
                break
        return rates

    def chosen_rate(self, get: GetRecord) -> float | None:
        """Return the learning rate that all seeds run with; None until it is known."""
        choice = self.choice(get)
        return None if choice is None else self.rate_of(choice)

    def rate_of(self, choice: OptionValues) -> float:
        """Return the learning rate with these options: theirs, or that of the run document."""
        rate: float = choice.get(RATE_OPTION, self.config.train.schedule.learning_rate)
        return rate

    def candidates(self, get: GetRecord) -> list[OptionValues]:
        """Return the options to try that follow from the records so far."""
        return self.variant.candidates or [{RATE_OPTION: rate} for rate in self.sweep_rates(get)]

    def choice(self, get: GetRecord) -> OptionValues | None:
        """Return the chosen options that all seeds run with; None until they are known."""
        if self.variant.search_of is not None:
            assert self.depends_on is not None
            return self.depends_on.choice(get)
        if self.variant.search or (self.rate_section is not None and self.rate_section.sweep is not None):
            return self._best(self.candidates(get), get)
        if self.rate_section is None:
            return {}
        rate = self.rate_from_rule(get)
        return None if rate is None else {RATE_OPTION: rate}

    def trials(self, get: GetRecord) -> Iterator[Trial]:
        """Yield the trials known so far: those that try options, then every seed. A trial may occur twice."""
        for candidate in self.candidates(get):
            yield from self.candidate_trials(candidate)
        if (choice := self.choice(get)) is not None:
            yield from self.seed_trials(choice)

    def candidate_trials(self, candidate: OptionValues) -> list[Trial]:
        """Return the trials that try options, by a search or by a sweep of the learning rate."""
        if self.variant.search:
            selection = self.study.selection
            assert selection is not None
            return [self._trial(candidate, seed, 0, selection.set) for seed in selection.seeds]
        assert self.rate_section is not None
        assert self.rate_section.sweep is not None
        return [self._trial(candidate, seed, 0) for seed in self.study.seeds[: self.rate_section.sweep.seeds]]

    def seed_trials(self, choice: OptionValues) -> list[Trial]:
        """Return a trial with the chosen options for each seed."""
        return [self._trial(choice, seed, number) for number, seed in enumerate(self.study.seeds)]

    def pending_trials(self, get: GetRecord) -> Iterator[PlannedTrial]:
        """Yield the trials that wait for a choice: the sweep's if its centre is unknown, and the remaining seeds."""
        if self.choice(get) is not None:
            return
        section, seeds = self.rate_section, self.study.seeds
        sweep_seeds = section.sweep.seeds if section is not None and section.sweep is not None else 0
        if section is not None and section.sweep is not None and not self.sweep_rates(get):
            for seed in seeds[:sweep_seeds]:
                yield from (PlannedTrial(self.name, seed, 0, self.config) for _ in section.sweep.factors)
        for number, seed in enumerate(seeds[sweep_seeds:], start=sweep_seeds):
            yield PlannedTrial(self.name, seed, number, self.config)

    def needed_pretraining(self, get: GetRecord) -> Iterator[Trial]:
        """Yield the trials that unfinished ones start from, those of later seeds included. A trial may occur twice."""
        if self.pretraining is not None:
            unfinished = (trial for trial in self.trials(get) if get(trial.key) is None)
            for trial in (*unfinished, *self.pending_trials(get)):
                yield self.pretraining.trial_before(trial.seed, trial.priority)

    def selection_score(self, get: GetRecord) -> tuple[float, ...] | None:
        """Return the sort key of the chosen options in the selection; None without a search, or until it is done."""
        choice = self.choice(get)
        if not self.variant.search or choice is None:
            return None
        return self._score(known_records(self.candidate_trials(choice), get))

    def _trial(self, choice: OptionValues, seed: int, priority: int, extra: OptionValues | None = None) -> Trial:
        first = None if self.pretraining is None else self.pretraining.trial_before(seed, priority)
        start = {} if first is None else {START_OPTION: first.key}
        settings = {**self.settings, **start, **(extra or {}), **choice}
        return Trial(self.name, seed, priority, self.build_config(settings, seed), settings, choice, first)

    def _best(self, candidates: Sequence[OptionValues], get: GetRecord) -> OptionValues | None:
        """Return the candidate with the best mean score over its seeds; None until all are tried."""
        scores = list[tuple[float, ...]]()
        for candidate in candidates:
            trials = self.candidate_trials(candidate)
            records = known_records(trials, get)
            if len(records) < len(trials):
                return None
            scores.append(self._score(records))
        return candidates[scores.index(max(scores))] if scores else None

    def _score(self, records: Sequence[TrialRecord]) -> tuple[float, ...]:
        """Return the sort key: accuracy, then loss; before both, steps to target if the study chooses by those."""
        accuracy = fmean(record.top1 or 0.0 for record in records)
        loss = _mean_or_infinity([record.loss for record in records])
        if self.study.choose == "accuracy":
            return accuracy, -loss
        reached = [record.steps_to_target(self.study.target or 0.0) for record in records]
        steps = _mean_or_infinity([None if point is None else point[0] for point in reached])
        return -steps, accuracy, -loss


@dataclass(frozen=True)
class PretrainingSeries(SweepSeries):
    """Pretraining, once for each seed of the study and of its selection; it chooses nothing."""

    @classmethod
    def of_section(cls, study: StudyDocument, section: PretrainingSection, build_config: BuildConfig) -> Self:
        return cls(study, Variant(name=section.name, set=section.set), (), None, build_config)

    @property
    def rate_section(self) -> RateSection | None:
        return None

    def trial_before(self, seed: int, priority: int) -> Trial:
        """Return the trial whose model a trial of this seed and priority starts from."""
        return self._trial({}, seed, priority - 1)

    def seed_trials(self, choice: OptionValues) -> list[Trial]:
        selection = self.study.selection
        own = [self.trial_before(seed, number) for number, seed in enumerate(self.study.seeds)]
        return [*own, *(self.trial_before(seed, 0) for seed in (selection.seeds if selection else ()))]


def known_records(trials: Sequence[Trial], get: GetRecord) -> list[TrialRecord]:
    return [record for trial in trials if (record := get(trial.key)) is not None]


def round_rate(rate: float) -> float:
    """Round to four significant digits, so that tables show the exact rate that ran."""
    return float(f"{rate:.4g}")


def format_choice(choice: OptionValues) -> str:
    """Return options as text, such as `rate 0.2, trust coefficient 0.001`."""
    names = {RATE_OPTION: "rate"}
    return ", ".join(
        f"{names.get(name, short_option_name(name))} {value:g}"
        if isinstance(value, float)
        else f"{short_option_name(name)} {format_option_value(value)}"
        for name, value in choice.items()
    )


def short_option_name(option: str) -> str:
    """Return the last component of an option's name, such as batch for `train.global_batch`."""
    return option.rpartition(".")[2].removeprefix("global_").replace("_", " ")


def format_option_value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _mean_or_infinity(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else float("inf")
