"""Families of images, cases, and the batches and weights that both engines begin with."""

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
class Family:
    """Images, and the network that trains on them. source: of the images; None: given on the command line."""

    name: str
    title: str
    source: str | None
    settings: dict[str, Any]


FAMILIES = {
    "digits": Family(
        "digits",
        "handwritten digits at 8 px, ResNet-18 of width 8",
        "digits",
        {
            "input": {"image_size": 8, "crop": {"scale": [0.7, 1.0], "ratio": [0.85, 1.18], "flip": 0.0}},
            "model": {"name": "resnet18", "stem": "small", "width": 8},
        },
    ),
    "photographs": Family(
        "photographs",
        "Imagenette's photographs at 64 px, ResNet-18 of width 16",
        None,
        {"input": {"image_size": 64}, "model": {"name": "resnet18", "width": 16}},
    ),
}
TINY = Family(
    "tiny",
    "handwritten digits at 8 px, for the small form",
    "digits",
    FAMILIES["digits"].settings | {"model": {"name": "resnet18", "stem": "small", "width": 4}},
)
RULES: dict[str, tuple[dict[str, Any], float]] = {
    "sgd": ({"name": "sgd", "weight_decay": 5e-4}, 0.1),
    "lars": ({"name": "lars", "weight_decay": 5e-4}, 8.0),
}
"""Optimizer sections and learning rates."""


@dataclass(frozen=True)
class Case:
    """An optimizer, ranks that share batch statistics, and whether the update is sharded."""

    rule: str
    group: int
    sharded: bool

    @property
    def name(self) -> str:
        return f"{self.rule}-{self.group}-{'sharded' if self.sharded else 'whole'}"


CASES = [Case(rule, group, sharded) for rule in RULES for group in (1, 4) for sharded in (False, True)]


@dataclass(frozen=True)
class Data:
    """Input of both engines: batches [updates, n, ...] in the order of the ranks, and the validation split.

    samples: images of the training split. weights: an exported model's file, the network before the first update.
    """

    classes: int
    images: Values
    labels: Values
    validation_images: Values
    validation_labels: Values
    samples: int
    weights: Path


@dataclass(frozen=True)
class Trained:
    """The loss of every update, and accuracy on the validation split after the last."""

    losses: list[float]
    top1: float


def document(family: Family, case: Case, seed: int, work: Path, source: str, engine: str, epochs: float) -> RunConfig:
    """The same run for both engines, on four ranks in two rows."""
    optimizer, rate = RULES[case.rule]
    model = {**family.settings["model"], "batch_norm": {"group": case.group}}
    return RunConfig.model_validate(
        {
            **family.settings,
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


def shard_set_of(config: RunConfig) -> ShardSet:
    """The images as a shard set, packed if it is missing."""
    local.shard(config.data, config.run.workspace)
    return ShardSet.open(Path(dataset_directory(config.run.workspace, config.data)))


def prepare(config: RunConfig, shard_set: ShardSet, updates: int, weights: Path) -> Data:
    """Read the first batches of a run by its own loader and sample order, and draw the network's first weights."""
    from podscale.jax.models import initialise

    training, validation = shard_set.split("train"), shard_set.split("validation")
    ranks = range(RANKS)
    order, phases = build_sampler(config, training), image_phases(config, len(training))
    loader = build_loader(config, training, order, phases=phases, ranks=ranks, world_size=RANKS, device="cpu")
    with_labels = [(batch.images, batch.labels) for batch in loader.batches(0, updates)]
    loader.close()
    judge = build_evaluation_loader(config, validation, ranks=ranks, world_size=RANKS, device="cpu")
    steps = -(-len(validation) // (RANKS * config.evaluate.batch))
    judged = [(batch.images, batch.labels, batch.weights > 0) for batch in judge.batches(0, steps)]
    judge.close()
    classes = len(shard_set.classes)
    parameters, statistics = initialise(config.model, classes, config.run.seed)
    weights.parent.mkdir(parents=True, exist_ok=True)
    save_file({**parameters, **statistics}, weights)
    return Data(
        classes,
        np.stack([np.asarray(images) for images, _ in with_labels]),
        np.stack([labels for _, labels in with_labels]),
        np.concatenate([np.asarray(images)[real] for images, _, real in judged]),
        np.concatenate([labels[real] for _, labels, real in judged]),
        len(training),
        weights,
    )
