"""Tasks and cases to compare, and the batches and first weights of both engines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from podscale.config import RunConfig
from podscale.data.loaders.build_loader import build_evaluation_loader, build_loader
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from podscale.runs.directory import dataset_directory
from podscale.stages import local
from podscale.training.schedules import image_phases

RANKS, GLOBAL_BATCH = 4, 64
Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Task:
    """Images, and the model that trains on them.

    Args:
        name: name on the command line.
        title: end of the title of the page.
        source: source of the images; None: from the command line.
        settings: sections of the run document.
    """

    name: str
    title: str
    source: str | None
    settings: dict[str, Any]


TASKS = {
    "digits": Task(
        "digits",
        "handwritten digits at 8 px, ResNet-18 of width 8",
        "digits",
        {
            "input": {"image_size": 8, "crop": {"scale": [0.7, 1.0], "ratio": [0.85, 1.18], "flip": 0.0}},
            "model": {"name": "resnet18", "stem": "small", "width": 8},
        },
    ),
    "photographs": Task(
        "photographs",
        "Imagenette's photographs at 64 px, ResNet-18 of width 16",
        None,
        {"input": {"image_size": 64}, "model": {"name": "resnet18", "width": 16}},
    ),
}
TINY = Task(
    "tiny",
    "handwritten digits at 8 px, for the small form",
    "digits",
    TASKS["digits"].settings | {"model": {"name": "resnet18", "stem": "small", "width": 4}},
)
RULES: dict[str, tuple[dict[str, Any], float]] = {
    "sgd": ({"name": "sgd", "weight_decay": 5e-4}, 0.1),
    "lars": ({"name": "lars", "weight_decay": 5e-4}, 8.0),
}
"""Optimizer sections and learning rates."""


@dataclass(frozen=True)
class Case:
    """Optimizer, ranks that share batch statistics, and form of the weight update."""

    rule: str
    group: int
    sharded: bool

    @property
    def name(self) -> str:
        return f"{self.rule}-{self.group}-{'sharded' if self.sharded else 'whole'}"


CASES = [Case(rule, group, sharded) for rule in RULES for group in (1, 4) for sharded in (False, True)]


@dataclass(frozen=True)
class ParityInput:
    """Input of both engines.

    Args:
        images: uint8 [steps, batch, ...], in the order of the ranks.
        samples: images of the training split.
        weights: file of the model before the first step.
    """

    classes: int
    images: Values
    labels: Values
    validation_images: Values
    validation_labels: Values
    samples: int
    weights: Path


@dataclass(frozen=True)
class TrainingResult:
    """Loss of every step, and accuracy on the validation split after the last."""

    losses: list[float]
    top1: float


def document(task: Task, case: Case, seed: int, work: Path, source: str, engine: str, epochs: float) -> RunConfig:
    """Return the run document of a case, on four ranks in two rows."""
    optimizer, rate = RULES[case.rule]
    model = {**task.settings["model"], "batch_norm": {"group": case.group}}
    return RunConfig.model_validate(
        {
            **task.settings,
            "run": {"seed": seed, "workspace": str(work)},
            "data": {"source": source},
            "model": model,
            "train": {
                "engine": engine,
                "epochs": epochs,
                "global_batch": GLOBAL_BATCH,
                "optimizer": optimizer,
                "weight_update": "sharded" if case.sharded else "replicated",
                "all_reduce": {"algorithm": "torus2d", "row": 2},
                "schedule": {"learning_rate": rate, "warmup_epochs": epochs / 5},
            },
        }
    )


def open_or_pack(config: RunConfig) -> ShardSet:
    """Return the shard set of the images, packed if it is missing."""
    local.shard(config.data, config.run.workspace)
    return ShardSet.open(Path(dataset_directory(config.run.workspace, config.data)))


def prepare_input(config: RunConfig, shard_set: ShardSet, steps: int, weights: Path) -> ParityInput:
    """Read the first batches of a run by its own loader and sampler, and initialise the weights."""
    from podscale.jax.models import initialise

    training, validation = shard_set.split("train"), shard_set.split("validation")
    ranks = range(RANKS)
    order, phases = build_sampler(config, training), image_phases(config, len(training))
    loader = build_loader(config, training, order, phases=phases, ranks=ranks, world_size=RANKS, device="cpu")
    batches = [(batch.images, batch.labels) for batch in loader.batches(0, steps)]
    loader.close()
    validation_loader = build_evaluation_loader(config, validation, ranks=ranks, world_size=RANKS, device="cpu")
    validation_steps = -(-len(validation) // (RANKS * config.evaluate.batch))
    validated = [
        (batch.images, batch.labels, batch.weights > 0) for batch in validation_loader.batches(0, validation_steps)
    ]
    validation_loader.close()
    classes = len(shard_set.classes)
    parameters, statistics = initialise(config.model, classes, config.run.seed)
    weights.parent.mkdir(parents=True, exist_ok=True)
    save_file({**parameters, **statistics}, weights)
    return ParityInput(
        classes,
        np.stack([np.asarray(images) for images, _ in batches]),
        np.stack([labels for _, labels in batches]),
        np.concatenate([np.asarray(images)[real] for images, _, real in validated]),
        np.concatenate([labels[real] for _, labels, real in validated]),
        len(training),
        weights,
    )
