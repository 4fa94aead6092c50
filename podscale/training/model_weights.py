"""Export of the final model: safetensors and model.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors.numpy import save

from podscale import models
from podscale.config import RunConfig
from podscale.runs.ensemble_members import MODEL_JSON
from podscale.runs.model_files import (
    MODEL_FORMAT,
    OTHER_WEIGHTS_FILES,
    WEIGHTS_FILE,
    inference_options_of,
    preprocessing_of,
)
from podscale.training.run_progress import RunProgress
from podscale.util.files import write_atomically, write_json

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class TrainedModel:
    config: RunConfig
    classes: list[str]
    progress: RunProgress


def export_model(arrays: Arrays, trained: TrainedModel, directory: Path, other_arrays: Arrays | None = None) -> None:
    """Write fp32 weights and buffers under torchvision's names; model.json comes last and marks a complete export.

    Args:
        other_arrays: if a running average was kept, the trained weights or their average, whichever is not the model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / WEIGHTS_FILE, save(dict(arrays), metadata={"format": "pt"}))
    if other_arrays is not None:
        other = directory / OTHER_WEIGHTS_FILES[trained.config.evaluate.weights]
        write_atomically(other, save(dict(other_arrays), metadata={"format": "pt"}))
    write_json(directory / MODEL_JSON, describe_model(trained))


def describe_model(trained: TrainedModel) -> dict[str, Any]:
    """Return the content of model.json: architecture, classes, preprocessing, training."""
    config, progress = trained.config, trained.progress
    return {
        "format": MODEL_FORMAT,
        "run": config.run.id,
        "architecture": config.model.model_dump(mode="json"),
        "parameters": models.model_spec(config.model, len(trained.classes)).num_parameters,
        "classes": trained.classes,
        "preprocessing": preprocessing_of(config),
        "inference": inference_options_of(config),
        "training": {
            "epochs": config.train.epochs,
            "global_batch": config.train.global_batch,
            "updates": progress.step,
            "skipped_updates": progress.skipped,
            "evaluation": progress.evaluation,
            "started_from": progress.origin or None,
            "weights": config.evaluate.weights,
            "ema": config.train.ema.model_dump(mode="json") if config.train.ema.decay is not None else None,
        },
    }
