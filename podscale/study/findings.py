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

    rate: None while it is not known. expected: trainings that the study asks for. tried: records by rate of its sweep.
    """

    chain: SweepSeries
    line: str
    x: Any
    rate: float | None
    records: Sequence[TrialRecord]
    expected: int
    tried: dict[float, list[TrialRecord]]

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

    def reached(self, target: float) -> list[tuple[float, float]]:
        """(updates, epochs) of the trainings that came to the target."""
        return [found for record in self.records if (found := record.reached(target)) is not None]

    def curve(self) -> list[tuple[float, float, float]]:
        """(epoch, mean, deviation) of top-1 over the trainings, at the evaluations that all of them have."""
        curves = [{point.step: point for point in record.curve} for record in self.records if record.top1 is not None]
        steps = set.intersection(*(set(curve) for curve in curves)) if curves else set()
        return [
            (curves[0][step].epoch, *mean_deviation([curve[step].top1 for curve in curves])) for step in sorted(steps)
        ]


@dataclass(frozen=True)
class StudyResults:
    """All arms of a study by line, in the order of the document; `unfinished`: cells that are still to be run."""

    study: StudyDocument
    arms: Sequence[ResultGroup]
    unfinished: int

    @property
    def lines(self) -> list[str]:
        return list(dict.fromkeys(arm.line for arm in self.arms))

    @property
    def xs(self) -> list[Any]:
        return list(dict.fromkeys(arm.x for arm in self.arms))

    def of(self, line: str) -> list[ResultGroup]:
        return [arm for arm in self.arms if arm.line == line]

    def at(self, x: Any) -> list[ResultGroup]:
        return [arm for arm in self.arms if arm.x == x]

    @property
    def numeric(self) -> bool:
        """Whether there is a horizontal axis: two numbers at least."""
        return len(self.xs) > 1 and all(isinstance(x, int | float) and not isinstance(x, bool) for x in self.xs)

    @property
    def records(self) -> list[TrialRecord]:
        """Every record that had a part in this, once."""
        each = [records for arm in self.arms for records in (arm.records, *arm.tried.values())]
        return list({record.cell: record for records in each for record in records}.values())

    def critical(self, line: str) -> CriticalBatch | None:
        """The critical batch of a line; None where the study counts no updates by batch.

        A batch counts where every training that ended reached the target.
        """
        target = self.study.target
        if target is None or self.study.axis != BATCH_OPTION or not self.numeric:
            return None
        arms = [arm for arm in self.of(line) if arm.records]
        if not arms:
            return None
        whole = {arm.chain.batch: arm for arm in arms if len(arm.reached(target)) == len(arm.records)}
        means = {batch: fmean(updates for updates, _ in arm.reached(target)) for batch, arm in whole.items()}
        return critical_batch(means, [arm.chain.batch for arm in arms if arm.chain.batch not in whole])

    def holds_to(self, line: str) -> Any:
        """The last x up to which no arm of a line is worse than its first beyond noise; None where seeds are too few to
        know noise."""
        first, *others = self.of(line)
        last = first.x if len(first.top1s) > 1 and any(len(arm.top1s) > 1 for arm in others) else None
        for arm in others:
            found = mean_difference(first.top1s, arm.top1s)
            if found is None or found.half is None or arm.diverged or (found.value < 0 and not found.noise):
                break
            last = arm.x
        return last


def study_results(grid: TrialGrid, get: GetRecord) -> StudyResults:
    """What the records say so far."""
    arms = [_build_group(grid.study, chain, get) for chain in grid.chains]
    return StudyResults(grid.study, arms, len(grid.due(get)) + len(grid.unknown(get)))


def _build_group(study: StudyDocument, chain: SweepSeries, get: GetRecord) -> ResultGroup:
    others = [
        f"{name.rpartition('.')[2].replace('_', ' ')} {value}" for name, value in chain.place if name != study.axis
    ]
    named = [chain.variant.name] if len(study.variants) > 1 or not others else []
    rate = chain.rate(get)
    cells = chain.seeded(rate) if rate is not None else []
    tried = {
        rate: [found for cell in chain.tried(rate) if (found := get(cell.key)) is not None] for rate in chain.sweep(get)
    }
    return ResultGroup(
        chain,
        ", ".join([*named, *others]),
        dict(chain.place).get(study.axis or ""),
        rate,
        [record for cell in cells if (record := get(cell.key)) is not None],
        len(study.seeds),
        {rate: records for rate, records in tried.items() if records},
    )
