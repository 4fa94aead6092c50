"""Sections for the collapsed ensemble of Codreanu 2017, and the schedule that they define.

A run has cycles, each with a lower peak learning rate than the one before. A short run, the collapse, starts from the
snapshot at the end of a cycle and trains with more weight decay and a gentler augmentation; its model is a member of
the ensemble. The default ratios are those of the authors' solver files (sara-nl/caffe, multinode/resnet50_custom_lr):
1.02, 0.764, 0.572 and then 0.143.
"""

from copy import deepcopy
from itertools import accumulate
from typing import Any

from pydantic import ValidationError, model_validator

from podscale.config.fields import Section, conflict_error, result_field
from podscale.config.recipes import set_if_absent
from podscale.config.schedule import CropSection, PhaseSection, ScheduleSection


class CollapseSection(Section):
    """Short run from the end of a cycle; other options are those of the document."""

    epochs: float = result_field(5.0, "Length of a collapse in passes over the training split.", gt=0)
    learning_rate: float | None = result_field(
        None, "Initial learning rate; default: `learning_rate_ratio` x the peak of its cycle.", gt=0
    )
    learning_rate_ratio: float = result_field(0.25, "Initial learning rate over the peak of its cycle.", gt=0)
    power: float = result_field(2.0, "Exponent of the polynomial decay to zero.", gt=0)
    weight_decay_factor: float = result_field(
        2.0,
        "Weight decay over that of the document. The authors double it after one hour, and take four times in the "
        "shorter run of 72 epochs.",
        ge=0,
    )
    crop: CropSection = CropSection(short_side=0.875)


class EnsembleSection(Section):
    """Cycles whose snapshots become the members of an ensemble; without cycles there is no ensemble.

    They set train.epochs, train.phases and checkpoint.snapshots, if the document leaves these open.
    """

    cycles: tuple[float, ...] = result_field(
        (), "Length of each cycle in epochs; the first follows train.schedule, the others restart below it."
    )
    first_peak: float | None = result_field(
        None, "Peak learning rate of the second cycle; default: `peak_ratio` x train.schedule.learning_rate.", gt=0
    )
    peak_ratio: float = result_field(0.75, "Peak of each later cycle over that of the one before.", gt=0)
    restart_ratio: float = result_field(
        0.25, "Learning rate at the start of a cycle's warm-up over the peak of the cycle before.", ge=0
    )
    warmup_epochs: tuple[float, ...] = result_field(
        (0.0,), "Warm-up of each cycle after the first, in epochs; a single value is for all."
    )
    power: float = result_field(2.0, "Exponent of the polynomial decay in the cycles after the first.", gt=0)
    decay_epochs: float | None = result_field(
        None, "Length of that decay in epochs, cut off at the end of the cycle; default: the cycle's length.", gt=0
    )
    collapsed: tuple[int, ...] | None = result_field(
        None, "Cycles, from 0, whose snapshots are collapsed; default: all of them."
    )
    collapse: CollapseSection = CollapseSection()

    @model_validator(mode="after")
    def _check_cycles(self) -> "EnsembleSection":
        if not self.cycles:
            return self
        if any(length <= 0 for length in self.cycles):
            raise conflict_error("cycles", "lengths must be positive", got=list(self.cycles))
        if len(self.warmup_epochs) not in (1, len(self.cycles) - 1) or any(w < 0 for w in self.warmup_epochs):
            raise conflict_error(
                "warmup_epochs",
                f"must be one value, or one for each of the {len(self.cycles) - 1} later cycles",
                got=list(self.warmup_epochs),
            )
        if any(not 0 <= number < len(self.cycles) for number in self.collapsed or ()):
            raise conflict_error(
                "collapsed", f"cycles are counted from 0 to {len(self.cycles) - 1}", got=list(self.collapsed or ())
            )
        if len(self.member_cycles) < 2:
            raise conflict_error(
                "cycles",
                "an ensemble of one is a single model",
                got=list(self.cycles),
                hint="Give at least two, or leave ensemble out.",
            )
        return self

    @property
    def member_cycles(self) -> tuple[int, ...]:
        """Cycles that are collapsed, in order."""
        return tuple(sorted(set(range(len(self.cycles)) if self.collapsed is None else self.collapsed)))

    @property
    def cycle_ends(self) -> tuple[float, ...]:
        """Epoch at which each cycle ends."""
        return tuple(round(end, 9) for end in accumulate(self.cycles))

    def peak_learning_rate(self, cycle: int, schedule: ScheduleSection) -> float:
        """Return the highest learning rate of a cycle; `schedule` is that of the first."""
        if cycle == 0:
            return schedule.learning_rate
        second = self.first_peak or self.peak_ratio * schedule.learning_rate
        return second * self.peak_ratio ** (cycle - 1)


def cycle_phases(section: EnsembleSection, schedule: ScheduleSection) -> tuple[PhaseSection, ...]:
    """Return the phases of a run from the second cycle on; `schedule` is that of the first.

    Each is a polynomial from its peak to the start of the next (`poly_cyc` in the authors' code), with an empty
    momentum buffer, because the authors start their solver from weights alone.
    """
    phases = []
    for cycle, start in enumerate(section.cycle_ends[:-1], start=1):
        warmup = section.warmup_epochs[min(cycle, len(section.warmup_epochs)) - 1]
        phases.append(
            PhaseSection(
                start=start,
                schedule=ScheduleSection(
                    name="polynomial",
                    power=section.power,
                    learning_rate=section.peak_learning_rate(cycle, schedule),
                    warmup_epochs=warmup,
                    warmup_start=section.restart_ratio * section.peak_learning_rate(cycle - 1, schedule)
                    if warmup
                    else 0.0,
                    momentum_correction=schedule.momentum_correction and warmup > 0,
                    decay_from="start",
                    decay_epochs=section.decay_epochs,
                ),
                reset_momentum=True,
            )
        )
    return tuple(phases)


def collapse_schedule(section: EnsembleSection, cycle: int, schedule: ScheduleSection) -> ScheduleSection:
    """Return the schedule of a cycle's collapse; `schedule` is that of the first cycle."""
    collapse = section.collapse
    rate = collapse.learning_rate or collapse.learning_rate_ratio * section.peak_learning_rate(cycle, schedule)
    return ScheduleSection(name="polynomial", power=collapse.power, learning_rate=rate)


def fill_cycles(values: Any) -> Any:
    """Fill the training values that follow from the ensemble section into a raw document; wrong values stay."""
    if not isinstance(values, dict) or not isinstance(values.get("ensemble"), dict):
        return values
    train = values.get("train")
    first = train.get("schedule", {}) if isinstance(train, dict) else {}
    try:
        section, schedule = EnsembleSection.model_validate(values["ensemble"]), ScheduleSection.model_validate(first)
    except ValidationError:
        return values
    if not section.cycles:
        return values
    filled = deepcopy(values)
    phases = [phase.model_dump(mode="json", exclude_unset=True) for phase in cycle_phases(section, schedule)]
    set_if_absent(filled, "train.epochs", section.cycle_ends[-1])
    set_if_absent(filled, "train.phases", phases)
    set_if_absent(filled, "checkpoint.snapshots", [section.cycle_ends[cycle] for cycle in section.member_cycles])
    return filled


def check_ensemble(section: EnsembleSection, epochs: float, snapshots: tuple[float, ...]) -> None:
    """Raise if a snapshot is outside of a run of `epochs`, or the snapshot of an ensemble member is missing."""
    if outside := [epoch for epoch in snapshots if not 0 < epoch <= epochs]:
        problem = f"not within a run of {epochs:g} epochs"
        raise conflict_error("checkpoint.snapshots", problem, got=outside[0], hint="Leave it out.")
    for cycle in section.member_cycles if section.cycles else ():
        if section.cycle_ends[cycle] not in snapshots:
            raise conflict_error(
                "checkpoint.snapshots",
                f"no snapshot is kept at epoch {section.cycle_ends[cycle]:g}, where cycle {cycle} of the ensemble ends",
                got=list(snapshots),
                hint="Add it, or leave checkpoint.snapshots, train.epochs and train.phases to the ensemble section.",
            )
