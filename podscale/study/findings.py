"""What the records of a study say: accuracy and updates to the target of each line at each point of the grid."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from podscale.study.cells import SweepSeries, TrialGrid
from podscale.study.document import BATCH_OPTION, StudyDocument
from podscale.study.records import GetRecord, TrialRecord
from podscale.study.statistics import CriticalBatch, critical_batch, mean_deviation, mean_difference


@dataclass(frozen=True)
class ResultGroup:
    """One line at one place: the trainings with every seed at the chosen rate.

    rate: None while it is not known. expected: trainings that the study asks for. sweep_records: records by rate of its
    sweep.
    """

    series: SweepSeries
    line: str
    x: Any
    rate: float | None
    records: Sequence[TrialRecord]
    expected: int
    sweep_records: dict[float, list[TrialRecord]]

    @cached_property
    def top1s(self) -> list[float]:
        """Of the trainings that did not diverge."""
        return [record.top1 for record in self.records if record.top1 is not None]

    @property
    def diverged(self) -> int:
        return sum(record.ended == "diverged" for record in self.records)

    @property
    def updates(self) -> int | None:
        done = [record.updates for record in self.records if record.ended == "done"]
        return max(done) if done else None

    @property
    def training_loss(self) -> float | None:
        losses = [record.training_loss for record in self.records if record.training_loss is not None]
        return fmean(losses) if losses else None

    def steps_to_target(self, target: float) -> list[tuple[float, float]]:
        """(updates, epochs) of the trainings that came to the target."""
        return [found for record in self.records if (found := record.steps_to_target(target)) is not None]

    def curve(self) -> list[tuple[float, float, float]]:
        """(epoch, mean, deviation) of top-1 over the trainings, at the evaluations that all of them have."""
        curves = [{point.step: point for point in record.curve} for record in self.records if record.top1 is not None]
        steps = set.intersection(*(set(curve) for curve in curves)) if curves else set()
        return [
            (curves[0][step].epoch, *mean_deviation([curve[step].top1 for curve in curves])) for step in sorted(steps)
        ]


@dataclass(frozen=True)
class StudyResults:
    """All arms of a study by line, in the order of the document; `unfinished_trials`: cells that are still to be run."""

    study: StudyDocument
    groups: Sequence[ResultGroup]
    unfinished_trials: int

    @property
    def lines(self) -> list[str]:
        return list(dict.fromkeys(arm.line for arm in self.groups))

    @property
    def xs(self) -> list[Any]:
        return list(dict.fromkeys(arm.x for arm in self.groups))

    def groups_of_line(self, line: str) -> list[ResultGroup]:
        return [arm for arm in self.groups if arm.line == line]

    def groups_at(self, x: Any) -> list[ResultGroup]:
        return [arm for arm in self.groups if arm.x == x]

    @property
    def has_numeric_axis(self) -> bool:
        """Whether there is a horizontal axis: two numbers at least."""
        return len(self.xs) > 1 and all(isinstance(x, int | float) and not isinstance(x, bool) for x in self.xs)

    @property
    def records(self) -> list[TrialRecord]:
        """Every record that had a part in this, once."""
        each = [records for arm in self.groups for records in (arm.records, *arm.sweep_records.values())]
        return list({record.cell: record for records in each for record in records}.values())

    def critical_batch(self, line: str) -> CriticalBatch | None:
        """The critical batch of a line; None where the study counts no updates by batch.

        A batch counts where every training that ended reached the target.
        """
        target = self.study.target
        if target is None or self.study.axis_option != BATCH_OPTION or not self.has_numeric_axis:
            return None
        arms = [arm for arm in self.groups_of_line(line) if arm.records]
        if not arms:
            return None
        whole = {arm.series.batch: arm for arm in arms if len(arm.steps_to_target(target)) == len(arm.records)}
        means = {batch: fmean(updates for updates, _ in arm.steps_to_target(target)) for batch, arm in whole.items()}
        return critical_batch(means, [arm.series.batch for arm in arms if arm.series.batch not in whole])

    def holds_up_to(self, line: str) -> Any:
        """The last x up to which no arm of a line is worse than its first beyond noise; None where seeds are too few to
        know noise."""
        first, *others = self.groups_of_line(line)
        last = first.x if len(first.top1s) > 1 and any(len(arm.top1s) > 1 for arm in others) else None
        for arm in others:
            found = mean_difference(first.top1s, arm.top1s)
            if found is None or found.half_width is None or arm.diverged or (found.value < 0 and not found.is_noise):
                break
            last = arm.x
        return last


def study_results(grid: TrialGrid, get: GetRecord) -> StudyResults:
    """What the records say so far."""
    arms = [_build_group(grid.study, chain, get) for chain in grid.series]
    return StudyResults(grid.study, arms, len(grid.due_trials(get)) + len(grid.pending_trials(get)))


def _build_group(study: StudyDocument, series: SweepSeries, get: GetRecord) -> ResultGroup:
    others = [
        f"{name.rpartition('.')[2].replace('_', ' ')} {value}"
        for name, value in series.point
        if name != study.axis_option
    ]
    named = [series.variant.name] if len(study.variants) > 1 or not others else []
    rate = series.chosen_rate(get)
    cells = series.seed_trials(rate) if rate is not None else []
    tried = {
        rate: [found for cell in series.sweep_trials(rate) if (found := get(cell.key)) is not None]
        for rate in series.sweep_rates(get)
    }
    return ResultGroup(
        series,
        ", ".join([*named, *others]),
        dict(series.point).get(study.axis_option or ""),
        rate,
        [record for cell in cells if (record := get(cell.key)) is not None],
        len(study.seeds),
        {rate: records for rate, records in tried.items() if records},
    )
