"""Grid of a study: expands the document into sweep series and selects the trials that are due."""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import product

from podscale.config import RunConfig
from podscale.errors import InputError, InputErrors
from podscale.study.document import BATCH_OPTION, StudyDocument
from podscale.study.records import GetRecord, trial_key
from podscale.study.sections import OptionValues
from podscale.study.sweep_series import GridPoint, PlannedTrial, PretrainingSeries, SweepSeries, Trial


class TrialGrid:
    """All sweep series of a study. Raises InputError if a trial is not a valid run."""

    def __init__(self, study: StudyDocument) -> None:
        self.study = study
        self._configs: dict[tuple[str, int], RunConfig] = {}

        self.points: list[GridPoint] = [
            tuple(zip(study.grid, values, strict=True)) for values in product(*study.grid.values())
        ]
        self.pretraining = {
            section.name: PretrainingSeries.of_section(study, section, self.config) for section in study.pretraining
        }
        self.series = [self.build_series(variant.name, point) for point in self.points for variant in study.variants]
        for series in self.all_series:
            series.check()
        self._check_budgets()

    @property
    def all_series(self) -> list[SweepSeries]:
        """Series that the results compare, then the pretraining."""
        return [*self.series, *self.pretraining.values()]

    @property
    def workspace(self) -> str:
        return self.series[0].config.run.workspace

    def build_series(self, variant: str, point: GridPoint) -> SweepSeries:
        """Build the series of a variant at a point. Raises InputError if the point is not in the grid."""
        if point not in self.points:
            raise InputError(
                f"a learning rate follows {variant} at {', '.join(f'{name}={value}' for name, value in point)}, which "
                "is not in the grid",
                field="learning_rate.at",
                got=variant,
                location=f"study {self.study.name}",
            )
        found, depends_on = self.study.variant(variant), None
        section = self.study.rate_of(found)
        if found.search_of is not None:
            depends_on = self.build_series(found.search_of, point)
        if section is not None and isinstance(section.at, str):
            batch = {} if section.batch is None else {BATCH_OPTION: section.batch}
            depends_on = self.build_series(section.at, tuple((name, batch.get(name, value)) for name, value in point))
        pretraining = None if found.start_from is None else self.pretraining[found.start_from]
        return SweepSeries(self.study, found, point, depends_on, self.config, pretraining)

    def _check_budgets(self) -> None:
        """Check that the variants of each criterion train on equally many images."""
        for criterion in self.study.criteria:
            here, there = self.study.criterion_points(criterion)
            first = self.build_series(criterion.variant, tuple(here.items()))
            for name in criterion.others:
                other = self.build_series(name, tuple(there.items()))
                budgets = training_epochs(first.config), training_epochs(other.config)
                if criterion.budget == "equal" and not math.isclose(*budgets, rel_tol=1e-3):
                    raise InputError(
                        f"{first.name} trains for {budgets[0]:g} epochs, {other.name} for {budgets[1]:g}",
                        field="criteria.budget",
                        got=criterion.name,
                        hint="Make them equal, or set budget: free.",
                        location=f"study {self.study.name}",
                    )

    def config(self, settings: OptionValues, seed: int) -> RunConfig:
        """Return the run document of these settings, with the trial key as run.id."""
        key = (repr(sorted(settings.items(), key=repr)), seed)
        if key not in self._configs:
            try:
                config = self.study.config({**settings, "run.seed": seed})
            except InputError as error:
                raise _name_trial(error, f"study {self.study.name}, trial {settings}") from None
            run = config.run.model_copy(update={"id": trial_key(config)})
            self._configs[key] = config.model_copy(update={"run": run})
        return self._configs[key]

    def unfinished_trials(self, get: GetRecord, series: Sequence[SweepSeries] | None = None) -> list[Trial]:
        """Return the known trials without a record and their pretraining, in the order in which to run them.

        Sweeps and first seeds come first, then one seed at a time, the cheapest trial first. Even a study that is cut
        short then has a result for every point. Pretraining comes just before the first trial that needs it.
        """
        unfinished: dict[str, Trial] = {}
        for sweep in self.series if series is None else series:
            for trial in (*sweep.trials(get), *sweep.needed_pretraining(get)):
                if get(trial.key) is not None:
                    continue
                if trial.key not in unfinished or trial.priority < unfinished[trial.key].priority:
                    unfinished[trial.key] = trial
        return sorted(unfinished.values(), key=lambda trial: trial.order)

    def due_trials(self, get: GetRecord, series: Sequence[SweepSeries] | None = None) -> list[Trial]:
        """Return the unfinished trials that can start, in the order in which to run them."""
        return [trial for trial in self.unfinished_trials(get, series) if not _waits_for_pretraining(trial, get)]

    def pending_trials(self, get: GetRecord, series: Sequence[SweepSeries] | None = None) -> list[PlannedTrial]:
        """Return the trials that wait for another one, which gives their learning rate or their first weights."""
        sweeps = self.series if series is None else series
        without_choice = [trial for sweep in sweeps for trial in sweep.pending_trials(get)]
        without_model = [trial for trial in self.unfinished_trials(get, series) if _waits_for_pretraining(trial, get)]
        return [*without_choice, *without_model]

    def known_trials(self, get: GetRecord) -> dict[str, Trial]:
        """Return every trial known so far, by key."""
        return {trial.key: trial for series in self.all_series for trial in series.trials(get)}

    @cached_property
    def pretraining_trials(self) -> dict[str, Trial]:
        """Trials of the pretraining, whose models others start from, by key."""
        return {trial.key: trial for series in self.pretraining.values() for trial in series.seed_trials({})}

    def waves(self) -> list[list[SweepSeries]]:
        """Group the series into waves that depend on earlier waves only."""
        depths = range(max(series.depth for series in self.all_series) + 1)
        return [[series for series in self.all_series if series.depth == depth] for depth in depths]


def _waits_for_pretraining(trial: Trial, get: GetRecord) -> bool:
    return trial.pretraining is not None and get(trial.pretraining.key) is None


def training_epochs(config: RunConfig) -> float:
    """Return the epochs of a trial, with those of its ensemble's collapses."""
    members = len(config.ensemble.member_cycles) if config.ensemble.cycles else 0
    return config.train.epochs + members * config.ensemble.collapse.epochs


def _name_trial(error: InputError, trial: str) -> InputError:
    """Return the error of a trial's document with the trial as its location."""
    if isinstance(error, InputErrors):
        return InputErrors(error.errors, f"{trial}:")
    return InputError(error.problem, field=error.field, got=error.got, hint=error.hint, location=trial)
