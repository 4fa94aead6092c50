"""Trials of a study: expand the document into runs and select those that are due.

Everything here is a function of the document and the records so far. A sweep series is one variant at one point of
the grid: the learning rates of its sweep, then every seed at the chosen rate.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Any

from podscale.config import RunConfig
from podscale.errors import InputError, InputErrors
from podscale.study.document import BATCH_OPTION, RATE_OPTION, OptionValues, RateSection, StudyDocument, Variant
from podscale.study.records import GetRecord, TrialRecord, trial_key

GridPoint = tuple[tuple[str, Any], ...]
"""A point of the grid: (option, value) in the order of the document."""


@dataclass(frozen=True)
class Trial:
    """One run of a study.

    Args:
        series: name of the sweep series it belongs to.
        settings: options on top of the study's.
        priority: 0 runs first; each further seed adds 1.
    """

    series: str
    settings: OptionValues
    seed: int
    priority: int
    config: RunConfig

    @property
    def key(self) -> str:
        return self.config.run.id

    @property
    def rate(self) -> float:
        return self.config.train.schedule.learning_rate

    @property
    def name(self) -> str:
        """Display name: series, learning rate and seed."""
        return f"{self.series}, rate {self.rate:g}, seed {self.seed}"

    @property
    def cost(self) -> tuple[float, float]:
        return _trial_cost(self.config)


class TrialGrid:
    """All sweep series of a study. Raises InputError if a trial is not a valid run."""

    def __init__(self, study: StudyDocument) -> None:
        self.study = study
        self._configs: dict[tuple[str, int], RunConfig] = {}
        self.points: list[GridPoint] = [
            tuple(zip(study.grid, values, strict=True)) for values in product(*study.grid.values())
        ]
        self.series = [SweepSeries(self, variant, point) for point in self.points for variant in study.variants]
        for sweep in self.series:
            sweep.check()

    @property
    def workspace(self) -> str:
        return self.series[0].config.run.workspace

    def find_series(self, variant: str, point: GridPoint) -> "SweepSeries":
        found = (sweep for sweep in self.series if sweep.variant.name == variant and sweep.point == point)
        sweep = next(found, None)
        if sweep is None:
            raise InputError(
                f"a learning rate follows {variant} at {', '.join(f'{name}={value}' for name, value in point)}, which "
                "is not in the grid",
                field="learning_rate.at",
                got=variant,
                location=f"study {self.study.name}",
            )
        return sweep

    def config(self, settings: OptionValues, seed: int) -> RunConfig:
        """Return the run document of these settings, with the trial key as run.id."""
        known = (repr(sorted(settings.items(), key=repr)), seed)
        if known not in self._configs:
            try:
                config = self.study.config({**settings, "run.seed": seed})
            except InputError as error:
                raise _name_trial(error, f"study {self.study.name}, cell {settings}") from None
            run = config.run.model_copy(update={"id": trial_key(config)})
            self._configs[known] = config.model_copy(update={"run": run})
        return self._configs[known]

    def due_trials(self, get: GetRecord, series: "Sequence[SweepSeries] | None" = None) -> list[Trial]:
        """Return the known trials without a record, in the order in which to run them.

        Sweeps and first seeds come first, then one seed at a time, the cheapest trial first. A study that is cut short
        then has a result for every point.
        """
        found: dict[str, Trial] = {}
        for sweep in self.series if series is None else series:
            for trial in sweep.trials(get):
                if get(trial.key) is None and (trial.key not in found or trial.priority < found[trial.key].priority):
                    found[trial.key] = trial
        return sorted(found.values(), key=lambda trial: (trial.priority, trial.cost))

    def known_trials(self, get: GetRecord) -> dict[str, Trial]:
        """Return every trial known so far by key, with or without a record."""
        return {trial.key: trial for sweep in self.series for trial in sweep.trials(get)}

    def pending_trials(self, get: GetRecord, series: "Sequence[SweepSeries] | None" = None) -> list["PendingTrial"]:
        """Return the trials whose learning rate depends on a trial that has not finished."""
        return [trial for sweep in (self.series if series is None else series) for trial in sweep.pending_trials(get)]

    def waves(self) -> list[list["SweepSeries"]]:
        """Group the series into waves; the series of one wave depend on earlier waves only."""
        depths = [sweep.depth for sweep in self.series]
        return [
            [sweep for sweep, depth in zip(self.series, depths, strict=True) if depth == wave]
            for wave in range(max(depths) + 1)
        ]


@dataclass(frozen=True)
class PendingTrial:
    """A trial whose learning rate is not known yet; `config` holds a placeholder rate."""

    series: str
    seed: int
    priority: int
    config: RunConfig

    @property
    def cost(self) -> tuple[float, float]:
        return _trial_cost(self.config)


@dataclass(frozen=True)
class SweepSeries:
    """One variant at one point of the grid."""

    grid: TrialGrid
    variant: Variant
    point: GridPoint

    @property
    def name(self) -> str:
        values = ", ".join(f"{_short_name(name)} {_format_value(value)}" for name, value in self.point)
        return f"{self.variant.name}, {values}" if values else self.variant.name

    @property
    def rate_section(self) -> RateSection | None:
        return self.grid.study.rate_of(self.variant)

    @cached_property
    def settings(self) -> OptionValues:
        return {**self.variant.set, **dict(self.point)}

    @cached_property
    def config(self) -> RunConfig:
        """Run document with the first seed, at the document's own learning rate."""
        return self.grid.config(self.settings, self.grid.study.seeds[0])

    @property
    def batch(self) -> int:
        return self.config.train.global_batch

    @property
    def depth(self) -> int:
        """Number of series whose rates must be known before this one's."""
        followed = self.depends_on
        return 0 if followed is None else followed.depth + 1

    @property
    def depends_on(self) -> "SweepSeries | None":
        """Series from whose chosen rate this one's is derived; None if there is none."""
        section = self.rate_section
        if section is None or not isinstance(section.at, str):
            return None
        point = self.point
        if section.batch is not None:
            point = tuple((name, section.batch if name == BATCH_OPTION else value) for name, value in point)
        return self.grid.find_series(section.at, point)

    def check(self) -> None:
        """Raise InputError if this series cannot run, whatever rates are chosen."""
        section, batch = self.rate_section, self.batch
        if section is not None and section.table and batch not in section.table:
            raise InputError(
                f"no rate for this batch of {self.variant.name}; it has {', '.join(map(str, section.table))}",
                field="learning_rate.table",
                got=batch,
                location=f"study {self.grid.study.name}",
            )
        if section is not None and section.sweep is not None and section.sweep.seeds > len(self.grid.study.seeds):
            raise InputError(
                f"more than the {len(self.grid.study.seeds)} seeds of the study, for {self.variant.name}",
                field="learning_rate.sweep.seeds",
                got=section.sweep.seeds,
                location=f"study {self.grid.study.name}",
            )
        for name, _ in self.point:
            if name in self.variant.set:
                problem = f"in the grid and in {self.variant.name}"
                raise InputError(problem, field=name, location=f"study {self.grid.study.name}")
        _ = self.depends_on

    def rate_from_rule(self, get: GetRecord) -> float | None:
        """Return the rate by rule or table; None if there is no rule or the rate it depends on is not known yet."""
        section = self.rate_section
        if section is None:
            return None
        if section.table:
            return section.table[self.batch]
        followed = self.depends_on
        base = section.at if followed is None else followed.chosen_rate(get)
        if base is None:
            return None
        assert isinstance(base, float)
        times = 1.0 if section.batch is None else self.batch / section.batch
        return round_rate(base * {"none": 1.0, "linear": times, "sqrt": times**0.5}[section.rule])

    def sweep_rates(self, get: GetRecord) -> list[float]:
        """Return the rates to try, rising, as far as the records so far determine them; empty without a sweep."""
        section, centre = self.rate_section, self.rate_from_rule(get)
        if section is None or section.sweep is None or centre is None:
            return []
        rates = [round_rate(centre * factor) for factor in section.sweep.factors]
        for _ in range(section.sweep.widen):
            best = self._best_rate(rates, get)
            if best == rates[0]:
                rates.insert(0, round_rate(rates[0] * rates[0] / rates[1]))
            elif best == rates[-1]:
                rates.append(round_rate(rates[-1] * rates[-1] / rates[-2]))
            else:
                break
        return rates

    def chosen_rate(self, get: GetRecord) -> float | None:
        """Return the rate that all seeds run with; None until it is known."""
        if self.rate_section is None:
            return self.config.train.schedule.learning_rate
        if self.rate_section.sweep is None:
            return self.rate_from_rule(get)
        return self._best_rate(self.sweep_rates(get), get)

    def trials(self, get: GetRecord) -> Iterator[Trial]:
        """Yield the trials known so far: the sweep, then every seed at the chosen rate. A trial may occur twice."""
        for rate in self.sweep_rates(get):
            yield from self.sweep_trials(rate)
        if (chosen := self.chosen_rate(get)) is not None:
            yield from self.seed_trials(chosen)

    def sweep_trials(self, rate: float) -> list[Trial]:
        """Return the trials of one rate of the sweep."""
        assert self.rate_section is not None
        assert self.rate_section.sweep is not None
        return [self._trial(rate, seed, 0) for seed in self.grid.study.seeds[: self.rate_section.sweep.seeds]]

    def seed_trials(self, rate: float) -> list[Trial]:
        """Return the trials of one rate, one per seed."""
        return [self._trial(rate, seed, turn) for turn, seed in enumerate(self.grid.study.seeds)]

    def pending_trials(self, get: GetRecord) -> Iterator[PendingTrial]:
        """Yield the trials that wait for a rate: the sweep's if its centre is unknown, and the remaining seeds."""
        if self.chosen_rate(get) is not None:
            return
        study, section = self.grid.study, self.rate_section
        assert section is not None
        tried = section.sweep.seeds if section.sweep is not None else 0
        if section.sweep is not None and not self.sweep_rates(get):
            for seed in study.seeds[:tried]:
                yield from (PendingTrial(self.name, seed, 0, self.config) for _ in section.sweep.factors)
        for turn, seed in enumerate(study.seeds):
            if turn >= tried:
                yield PendingTrial(self.name, seed, turn, self.config)

    def _trial(self, rate: float, seed: int, priority: int) -> Trial:
        settings = self.settings if self.rate_section is None else {**self.settings, RATE_OPTION: rate}
        return Trial(self.name, settings, seed, priority, self.grid.config(settings, seed))

    def _best_rate(self, rates: Sequence[float], get: GetRecord) -> float | None:
        """Return the rate with the best mean score over the sweep's seeds; None until all are tried."""
        scores: Mapping[float, list[TrialRecord | None]] = {
            rate: [get(trial.key) for trial in self.sweep_trials(rate)] for rate in rates
        }
        if not scores or any(record is None for found in scores.values() for record in found):
            return None
        return max(rates, key=lambda rate: self._score([record for record in scores[rate] if record is not None]))

    def _score(self, found: Sequence[TrialRecord]) -> tuple[float, ...]:
        """Return the sort key: accuracy, then loss; preceded by steps to target if the study chooses by those."""
        worst = float("-inf")
        accuracy = fmean(record.top1 or 0.0 for record in found)
        losses = [record.loss for record in found]
        loss = -fmean(known) if len(known := [x for x in losses if x is not None]) == len(losses) else worst
        if self.grid.study.choose == "accuracy":
            return accuracy, loss
        reached = [record.steps_to_target(self.grid.study.target or 0.0) for record in found]
        updates = [point[0] for point in reached if point is not None]
        return -fmean(updates) if len(updates) == len(found) else worst, accuracy, loss


def round_rate(rate: float) -> float:
    """Round to four significant digits, so that tables show the exact rate that ran."""
    return float(f"{rate:.4g}")


def _trial_cost(config: RunConfig) -> tuple[float, float]:
    """Return a sort key that orders cheap trials first: by epochs, then by steps per epoch."""
    return config.train.epochs, 1.0 / config.train.global_batch


def _short_name(option: str) -> str:
    """Return the last component of an option's name, such as batch for `train.global_batch`."""
    return option.rpartition(".")[2].removeprefix("global_").replace("_", " ")


def _format_value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _name_trial(error: InputError, trial: str) -> InputError:
    """Return the error of a trial's document with the name of the trial in front."""
    if isinstance(error, InputErrors):
        return InputErrors(error.errors, f"{trial}:")
    return InputError(error.problem, field=error.field, got=error.got, hint=error.hint, location=trial)
