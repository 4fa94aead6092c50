"""From a study document to its cells: which runs there are, and which are due as results come in.

Everything here is a function of the document and of the records so far. A chain is one variant at one point of the
grid: the rates of its sweep, then every seed at the rate that was chosen.
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
    """One run. settings: on top of the study's own; priority: 0 for what is run first, then a seed each."""

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
        """For people: the chain, the rate and the seed."""
        return f"{self.series}, rate {self.rate:g}, seed {self.seed}"

    @property
    def cost(self) -> tuple[float, float]:
        return _trial_cost(self.config)


class TrialGrid:
    """All chains of a study. Raises InputError where a cell is no valid run."""

    def __init__(self, study: StudyDocument) -> None:
        self.study = study
        self._configs: dict[tuple[str, int], RunConfig] = {}
        self.points: list[GridPoint] = [
            tuple(zip(study.grid, values, strict=True)) for values in product(*study.grid.values())
        ]
        self.series = [SweepSeries(self, variant, place) for place in self.points for variant in study.variants]
        for chain in self.series:
            chain.check()

    @property
    def workspace(self) -> str:
        return self.series[0].config.run.workspace

    def find_series(self, variant: str, point: GridPoint) -> "SweepSeries":
        found = (chain for chain in self.series if chain.variant.name == variant and chain.point == point)
        chain = next(found, None)
        if chain is None:
            raise InputError(
                f"a learning rate follows {variant} at {', '.join(f'{name}={value}' for name, value in point)}, which "
                "is not in the grid",
                field="learning_rate.at",
                got=variant,
                place=f"study {self.study.name}",
            )
        return chain

    def config(self, settings: OptionValues, seed: int) -> RunConfig:
        """The run of these settings, named by what changes its numbers."""
        known = (repr(sorted(settings.items(), key=repr)), seed)
        if known not in self._configs:
            try:
                config = self.study.config({**settings, "run.seed": seed})
            except InputError as error:
                raise _of_cell(error, f"study {self.study.name}, cell {settings}") from None
            run = config.run.model_copy(update={"id": trial_key(config)})
            self._configs[known] = config.model_copy(update={"run": run})
        return self._configs[known]

    def due_trials(self, get: GetRecord, series: "Sequence[SweepSeries] | None" = None) -> list[Trial]:
        """The cells that are known and have no record yet, in the order in which they are to run.

        First all sweeps and first seeds, then a seed at a time, and of each the cheapest first: a study that is cut
        short has something to say about every point.
        """
        found: dict[str, Trial] = {}
        for chain in self.series if series is None else series:
            for cell in chain.trials(get):
                if get(cell.key) is None and (cell.key not in found or cell.priority < found[cell.key].priority):
                    found[cell.key] = cell
        return sorted(found.values(), key=lambda cell: (cell.priority, cell.cost))

    def known_trials(self, get: GetRecord) -> dict[str, Trial]:
        """Every cell that is known so far, with and without a record, by its key."""
        return {cell.key: cell for chain in self.series for cell in chain.trials(get)}

    def pending_trials(self, get: GetRecord, series: "Sequence[SweepSeries] | None" = None) -> list["PendingTrial"]:
        """The cells whose rate another cell will decide."""
        return [cell for chain in (self.series if series is None else series) for cell in chain.pending_trials(get)]

    def waves(self) -> list[list["SweepSeries"]]:
        """Chains that need nothing of each other together, each wave after those that it follows."""
        depths = [chain.depth for chain in self.series]
        return [
            [chain for chain, depth in zip(self.series, depths, strict=True) if depth == wave]
            for wave in range(max(depths) + 1)
        ]


@dataclass(frozen=True)
class PendingTrial:
    """A cell that will run, at a rate that is not known yet; config is that of any rate."""

    series: str
    seed: int
    priority: int
    config: RunConfig

    @property
    def cost(self) -> tuple[float, float]:
        return _trial_cost(self.config)


@dataclass(frozen=True)
class SweepSeries:
    """One variant at one place of the grid."""

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
        """Its run with the first seed, at whatever rate the document gives."""
        return self.grid.config(self.settings, self.grid.study.seeds[0])

    @property
    def batch(self) -> int:
        return self.config.train.global_batch

    @property
    def depth(self) -> int:
        """Of chains whose rates must be known before this one's."""
        followed = self.depends_on
        return 0 if followed is None else followed.depth + 1

    @property
    def depends_on(self) -> "SweepSeries | None":
        """The chain whose chosen rate this one's follows from."""
        section = self.rate_section
        if section is None or not isinstance(section.at, str):
            return None
        place = self.point
        if section.batch is not None:
            place = tuple((name, section.batch if name == BATCH_OPTION else value) for name, value in place)
        return self.grid.find_series(section.at, place)

    def check(self) -> None:
        """Raises InputError where this chain could not run whatever the rates turn out to be."""
        section, batch = self.rate_section, self.batch
        if section is not None and section.table and batch not in section.table:
            raise InputError(
                f"no rate for this batch of {self.variant.name}; it has {', '.join(map(str, section.table))}",
                field="learning_rate.table",
                got=batch,
                place=f"study {self.grid.study.name}",
            )
        if section is not None and section.sweep is not None and section.sweep.seeds > len(self.grid.study.seeds):
            raise InputError(
                f"more than the {len(self.grid.study.seeds)} seeds of the study, for {self.variant.name}",
                field="learning_rate.sweep.seeds",
                got=section.sweep.seeds,
                place=f"study {self.grid.study.name}",
            )
        for name, _ in self.point:
            if name in self.variant.set:
                problem = f"in the grid and in {self.variant.name}"
                raise InputError(problem, field=name, place=f"study {self.grid.study.name}")
        _ = self.depends_on

    def rate_from_rule(self, get: GetRecord) -> float | None:
        """The rate by rule or table; None while the rate that it follows is not known, or where there is no rule."""
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
        """The rates to try, rising, as far as the records so far tell; empty without a sweep."""
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
        """The rate of this chain's comparison; None while it is not known."""
        if self.rate_section is None:
            return self.config.train.schedule.learning_rate
        if self.rate_section.sweep is None:
            return self.rate_from_rule(get)
        return self._best_rate(self.sweep_rates(get), get)

    def trials(self, get: GetRecord) -> Iterator[Trial]:
        """What is known so far: the sweep, then every seed at the chosen rate; a cell may come twice."""
        for rate in self.sweep_rates(get):
            yield from self.sweep_trials(rate)
        if (chosen := self.chosen_rate(get)) is not None:
            yield from self.seed_trials(chosen)

    def sweep_trials(self, rate: float) -> list[Trial]:
        """One rate of the sweep."""
        assert self.rate_section is not None
        assert self.rate_section.sweep is not None
        return [self._trial(rate, seed, 0) for seed in self.grid.study.seeds[: self.rate_section.sweep.seeds]]

    def seed_trials(self, rate: float) -> list[Trial]:
        """One rate with every seed."""
        return [self._trial(rate, seed, turn) for turn, seed in enumerate(self.grid.study.seeds)]

    def pending_trials(self, get: GetRecord) -> Iterator[PendingTrial]:
        """The cells that wait for a rate: of the sweep where nothing is known of its centre, and the further seeds."""
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
        """The best of these rates, the mean over the seeds of the sweep deciding; None until all are tried."""
        scores: Mapping[float, list[TrialRecord | None]] = {
            rate: [get(cell.key) for cell in self.sweep_trials(rate)] for rate in rates
        }
        if not scores or any(record is None for found in scores.values() for record in found):
            return None
        return max(rates, key=lambda rate: self._score([record for record in scores[rate] if record is not None]))

    def _score(self, found: Sequence[TrialRecord]) -> tuple[float, ...]:
        """By accuracy and then loss; before them, where asked, by the updates to the target."""
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
    """Four significant digits: what a table shows is what was run."""
    return float(f"{rate:.4g}")


def _trial_cost(config: RunConfig) -> tuple[float, float]:
    """Cheaper cells compare smaller: by epochs, then by updates an epoch."""
    return config.train.epochs, 1.0 / config.train.global_batch


def _short_name(option: str) -> str:
    """The last word of an option's name; of `train.global_batch`, batch."""
    return option.rpartition(".")[2].removeprefix("global_").replace("_", " ")


def _format_value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _of_cell(error: InputError, place: str) -> InputError:
    """Return an error of the document of one cell, with the cell named."""
    if isinstance(error, InputErrors):
        return InputErrors(error.errors, f"{place}:")
    return InputError(error.problem, field=error.field, got=error.got, hint=error.hint, place=place)
