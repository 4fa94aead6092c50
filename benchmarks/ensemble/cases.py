"""Tasks, and the run documents of all runs that are compared with one seed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from podscale.config import RunConfig, load
from podscale.config.document import format_overrides
from podscale.config.ensemble import collapse_schedule
from podscale.runs import ensemble_members

SEEDS_APART = 100
"""Distance between the seeds of two comparisons; members and restarts have seeds in between."""
COMMON: dict[str, Any] = {
    "train.ema.decay": 0.95,  # over about an epoch; does not change the trained weights
    "evaluate.every_epochs": 0,
    "checkpoint.every_epochs": 0,
    "telemetry": {"enabled": False, "log_every": 1000},
    "launch": {"processes": 1, "threads": 1},
}


@dataclass(frozen=True)
class Task:
    """Images, and the run document that trains on them in cycles.

    Args:
        about: paragraph about the task for the page.
        source: source of the images; None: from the command line.
    """

    name: str
    title: str
    about: str
    source: str | None
    document: Path
    settings: dict[str, Any]


DIGITS = ROOT / "pipelines/presets/digits-ensemble.yaml"
SMALL: dict[str, Any] = {"input.image_size": 8, "model.width": 8}
FEW = SMALL | {
    "data.validation_fraction": 0.8,
    "train.global_batch": 32,
    "train.schedule.learning_rate": 0.05,
}
TASKS = {
    task.name: task
    for task in (
        Task(
            "preset",
            "Handwritten digits, the preset as it is",
            "`digits-ensemble`: 1,438 images to train on, 359 to validate on, so one image is 0.28 points.",
            "digits",
            DIGITS,
            {},
        ),
        Task(
            "digits",
            "Handwritten digits at 8 px, ResNet-18 of width 8",
            "`digits-ensemble` with `input.image_size: 8` and `model.width: 8`, which is faster: 1,438 images to "
            "train on, 359 to validate on, so one image is 0.28 points.",
            "digits",
            DIGITS,
            SMALL,
        ),
        Task(
            "few-digits",
            "Handwritten digits at 8 px, a fifth of them to train on",
            "`digits-ensemble` with `input.image_size: 8`, `model.width: 8` and `data.validation_fraction: 0.8`: "
            "359 images to train on, 1,438 to validate on, so one image is 0.07 points and there "
            "is more to gain. `train.global_batch: 32`, so that there are more steps, and the learning rate by the "
            "linear rule.",
            "digits",
            DIGITS,
            FEW,
        ),
        Task(
            "few-digits-long",
            "Handwritten digits at 8 px, a fifth of them, four times as long",
            "`few-digits` with cycles of 24, 16 and 16 epochs, collapses of 8, and warm-ups four times as long.",
            "digits",
            DIGITS,
            FEW
            | {
                "ensemble": {"cycles": [24, 16, 16], "warmup_epochs": [4], "collapse.epochs": 8},
                "train.schedule.warmup_epochs": 8,
            },
        ),
        Task(
            "photographs",
            "Imagenette's photographs at 32 px",
            "The document that the studies on photographs vary (`pipelines/studies/base/photographs.yaml`) in the "
            "cycles of `digits-ensemble`.",
            None,
            ROOT / "pipelines/studies/base/photographs.yaml",
            {
                "train.epochs": 14,
                "train.schedule.warmup_epochs": 2,
                "ensemble": {
                    "cycles": [6, 4, 4],
                    "warmup_epochs": [1],
                    "collapse": {"epochs": 2, "crop": {"short_side": 0.875, "flip": 0.5}},
                },
            },
        ),
    )
}

TINY = Task(
    "tiny",
    "Handwritten digits at 8 px, for the small form",
    "Half an epoch where others take six; its results mean nothing.",
    "digits",
    DIGITS,
    SMALL
    | {
        "model.width": 4,
        "train.global_batch": 128,
        "ensemble": {"cycles": [0.5, 0.5], "warmup_epochs": [0], "collapse.epochs": 0.5},
        "train.schedule.warmup_epochs": 0,
    },
)


@dataclass(frozen=True)
class Comparison:
    """Runs of one seed; all alternatives train for the same epochs.

    Args:
        cycles: run in cycles, whose snapshots the members collapse. It evaluates the members as an ensemble.
        single: one run of the same length.
        ending: the same, with the collapse of a member as its last epochs.
        restarts: independent runs, as many as members.
        restart_ensemble: evaluation of the restarts as an ensemble.
        singles: evaluation of single, ending and cycles, each by itself.
    """

    cycles: RunConfig
    single: RunConfig
    ending: RunConfig
    restarts: tuple[RunConfig, ...]
    restart_ensemble: RunConfig
    singles: RunConfig

    @property
    def members(self) -> tuple[RunConfig, ...]:
        return tuple(member.config for member in ensemble_members.ensemble_members(self.cycles))

    @property
    def trained(self) -> tuple[RunConfig, ...]:
        """Runs to train, in order: members after the run whose snapshots they need."""
        return (self.cycles, *self.members, self.single, self.ending, *self.restarts)

    @property
    def evaluated(self) -> tuple[RunConfig, ...]:
        return (self.cycles, self.restart_ensemble, self.singles)

    @property
    def epochs(self) -> float:
        """Epochs of each alternative in all."""
        return self.single.train.epochs


def build_comparison(task: Task, seed: int, workspace: Path, source: str) -> Comparison:
    """Return the runs of a seed in a workspace."""

    def document(name: str, seed_of_run: int, **settings: Any) -> RunConfig:
        overrides = {
            **{**COMMON, **task.settings, "data.source": source, "run.workspace": str(workspace)},
            **{"run.id": f"{name}-{seed}", "run.seed": seed_of_run},
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        return load(task.document, format_overrides(overrides))

    first = seed * SEEDS_APART
    cycles = document("cycles", first)
    section, schedule = cycles.ensemble, cycles.train.schedule
    count = len(section.member_cycles)
    epochs = cycles.train.epochs + count * section.collapse.epochs
    long: dict[str, Any] = {"ensemble__cycles": [], "train__epochs": epochs}
    collapse = {
        "start": epochs - section.collapse.epochs,
        "schedule": collapse_schedule(section, 0, schedule).model_dump(mode="json"),
        "weight_decay": cycles.train.optimizer.weight_decay * section.collapse.weight_decay_factor,
        "crop": section.collapse.crop.model_dump(mode="json"),
        "reset_momentum": True,
    }
    shorter = {"train__epochs": epochs / count, "train__schedule__warmup_epochs": schedule.warmup_epochs / count}
    restarts = tuple(
        document(f"restart{number}", first + SEEDS_APART // 2 + number, **long | shorter) for number in range(count)
    )
    single, ending = document("single", first, **long), document("ending", first, **long, train__phases=[collapse])

    def evaluation(name: str, runs: tuple[RunConfig, ...]) -> RunConfig:
        return document(name, first, **long, evaluate__models=[run.run.id for run in runs])

    return Comparison(
        cycles, single, ending, restarts, evaluation("apart", restarts), evaluation("singles", (single, ending, cycles))
    )
