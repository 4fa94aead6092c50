"""Results of a study: accuracy and steps to the target, by line and grid point."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from podscale.study.critical_batch import CriticalBatch, critical_batch
from podscale.study.document import BATCH_OPTION, StudyDocument
from podscale.study.grid import TrialGrid
from podscale.study.records import GetRecord, TrialRecord
from podscale.study.sections import OptionValues
from podscale.study.seed_statistics import MeanDifference, mean_deviation, mean_difference, paired_difference
from podscale.study.sweep_series import SweepSeries, format_option_value, known_records, short_option_name


@dataclass(frozen=True)
class ResultGroup:
    """Trainings of one line at one grid point: all seeds with the chosen options.

    Args:
        line: Name of the line in charts and tables.
        x: Value on the horizontal axis.
        choice: Chosen options; None until they are known.
        expected: Number of trainings that the study requires.
        candidates: Options that were tried, with the records of each.
        selection_score: Sort key of the chosen options in the selection.
    """

    series: SweepSeries
    line: str
    x: Any
    choice: OptionValues | None
    records: Sequence[TrialRecord]
    expected: int
    candidates: Sequence[tuple[OptionValues, list[TrialRecord]]]
    selection_score: tuple[float, ...] | None = None

    @property
    def rate(self) -> float | None:
        """Learning rate of the trainings; None until it is known."""
        return None if self.choice is None else self.series.rate_of(self.choice)

    @cached_property
    def top1s(self) -> list[float]:
        """Top-1 of the trainings that did not diverge."""
        return [record.top1 for record in self.records if record.top1 is not None]

    @cached_property
    def member_top1s(self) -> list[float]:
        """Mean top-1 of the members, one value for each ensemble whose record has them."""
        return [fmean(record.members) for record in self.records if record.members]

    @property
    def diverged(self) -> int:
        return sum(record.ended == "diverged" for record in self.records)

    @property
    def steps(self) -> int | None:
        """Training steps of a finished training; None if none has finished."""
        return max((record.updates for record in self.records if record.ended == "done"), default=None)

    @property
    def training_loss(self) -> float | None:
        losses = [record.training_loss for record in self.records if record.training_loss is not None]
        return fmean(losses) if losses else None

    @property
    def record_lists(self) -> list[Sequence[TrialRecord]]:
        """Lists of all records behind this group."""
        return [self.records, *(records for _, records in self.candidates)]

    def steps_to_target(self, target: float) -> list[tuple[float, float]]:
        """Return (steps, epochs) of the trainings that reached the target."""
        return [reached for record in self.records if (reached := record.steps_to_target(target)) is not None]

    def curve(self) -> list[tuple[float, float, float]]:
        """Return (epoch, mean, deviation) of top-1 over the trainings, at the evaluations that all of them have."""
        curves = [{point.step: point for point in record.curve} for record in self.records if record.top1 is not None]
        steps = set.intersection(*(set(curve) for curve in curves)) if curves else set()
        return [
            (curves[0][step].epoch, *mean_deviation([curve[step].top1 for curve in curves])) for step in sorted(steps)
        ]


@dataclass(frozen=True)
class StudyResults:
    """All result groups of a study, in the order of the document, and the number of trials left to run."""

    study: StudyDocument
    groups: Sequence[ResultGroup]
    unfinished_trials: int
    pretraining: Mapping[str, Sequence[TrialRecord]] = field(default_factory=dict)
    """Records of the trainings that variants start from, by name."""

    @property
    def lines(self) -> list[str]:
        return list(dict.fromkeys(group.line for group in self.groups))

    @property
    def xs(self) -> list[Any]:
        return list(dict.fromkeys(group.x for group in self.groups))

    @property
    def last_groups(self) -> list[ResultGroup]:
        return self.groups_at(self.xs[-1]) if self.xs else []

    @property
    def axis_name(self) -> str:
        """Display name of the horizontal axis; "" without a grid."""
        return short_option_name(self.study.axis_option or "")

    def axis_label(self, x: Any) -> str:
        return f"{self.axis_name} {format_option_value(x)}"

    def difference(self, first: ResultGroup, group: ResultGroup) -> MeanDifference | None:
        """Return the difference of top-1 of a group from another; paired by seed in a study with criteria.

        Returns None if there is nothing to compare.
        """
        if not self.study.criteria:
            return mean_difference(first.top1s, group.top1s)
        pairs = ((record.top1, other.top1) for record, other in paired_records(group, first))
        differences = [top1 - other for top1, other in pairs if top1 is not None and other is not None]
        return paired_difference(differences) if differences else None

    def groups_of_line(self, line: str) -> list[ResultGroup]:
        return [group for group in self.groups if group.line == line]

    def groups_at(self, x: Any) -> list[ResultGroup]:
        return [group for group in self.groups if group.x == x]

    @property
    def has_numeric_axis(self) -> bool:
        """True if the horizontal axis has at least two values, all of them numbers."""
        return len(self.xs) > 1 and all(isinstance(x, int | float) and not isinstance(x, bool) for x in self.xs)

    @property
    def records(self) -> list[TrialRecord]:
        """Distinct records behind these results."""
        lists = [*(records for group in self.groups for records in group.record_lists), *self.pretraining.values()]
        return list({record.cell: record for records in lists for record in records}.values())

    def critical_batch(self, line: str) -> CriticalBatch | None:
        """Return the critical batch of a line; None if the study has no target or does not vary the batch.

        A batch counts as reaching the target if every finished training did.
        """
        target = self.study.target
        if target is None or self.study.axis_option != BATCH_OPTION or not self.has_numeric_axis:
            return None
        steps, failed = dict[int, float](), list[int]()
        for group in self.groups_of_line(line):
            reached = [count for count, _ in group.steps_to_target(target)]
            if reached and len(reached) == len(group.records):
                steps[group.series.batch] = fmean(reached)
            elif group.records:
                failed.append(group.series.batch)
        return critical_batch(steps, failed) if steps or failed else None

    def holds_up_to(self, line: str) -> Any:
        """Return the last x up to which no group of a line is significantly worse than its first.

        Returns None if there are too few seeds to estimate noise.
        """
        first, *others = self.groups_of_line(line)
        last = first.x if len(first.top1s) > 1 and any(len(group.top1s) > 1 for group in others) else None
        for group in others:
            change = self.difference(first, group)
            if change is None or change.half_width is None or group.diverged:
                break
            if change.value < 0 and not change.is_noise:
                break
            last = group.x
        return last


def paired_records(first: ResultGroup, second: ResultGroup) -> list[tuple[TrialRecord, TrialRecord]]:
    """Return the records of both groups for each seed that both have."""
    by_seed = {record.seed: record for record in second.records}
    return [(record, by_seed[record.seed]) for record in first.records if record.seed in by_seed]


def study_results(grid: TrialGrid, get: GetRecord) -> StudyResults:
    groups = [_build_group(grid.study, sweep, get) for sweep in grid.series]
    pretraining = {name: known_records(series.seed_trials({}), get) for name, series in grid.pretraining.items()}
    return StudyResults(grid.study, groups, len(grid.due_trials(get)) + len(grid.pending_trials(get)), pretraining)


def _build_group(study: StudyDocument, series: SweepSeries, get: GetRecord) -> ResultGroup:
    values = [f"{short_option_name(name)} {value}" for name, value in series.point if name != study.axis_option]
    name = [series.variant.name] if len(study.variants) > 1 or not values else []
    choice = series.choice(get)
    tried = [
        (candidate, known_records(series.candidate_trials(candidate), get)) for candidate in series.candidates(get)
    ]
    return ResultGroup(
        series,
        ", ".join([*name, *values]),
        dict(series.point).get(study.axis_option or ""),
        choice,
        known_records(series.seed_trials(choice), get) if choice is not None else [],
        len(study.seeds),
        [(one, records) for one, records in tried if records],
        series.selection_score(get),
    )
