"""Model files of a finished run, and checks on models that are evaluated together.

The weights are one safetensors file with the catalogue's names, the same for every engine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors.numpy import load_file

from podscale.config import ModelSection, RunConfig, load
from podscale.errors import InputError
from podscale.runs.directory import RunDirectory
from podscale.runs.ensemble_members import MODEL_JSON, combined_model_directories, resolve_model_directory
from podscale.runs.user_code import MODEL_CODE
from podscale.util.files import file_sha256
from podscale.util.formatting import first_line

MODEL_FORMAT = "podscale-model-1"
WEIGHTS_FILE = "model.safetensors"
DESCRIPTION_PREFIX = "podscale:model.json/"
"""Prefix of the entries of model.json in the metadata of an exported file."""
OTHER_WEIGHTS_FILES = {"trained": "ema.safetensors", "ema": "trained.safetensors"}
"""File of the weights other than the final model's, by `evaluate.weights`."""


def read_weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, npt.NDArray[Any]]:
    """Return parameters and running statistics by name; raises InputError if there is no file or the shapes differ."""
    try:
        arrays: dict[str, npt.NDArray[Any]] = load_file(path)
    except FileNotFoundError as error:
        raise InputError("there is no trained model", field=str(path), hint="Run `podscale train` first.") from error
    except Exception as error:
        raise InputError(f"cannot read the trained model: {error}", field=str(path)) from error
    if dict(shapes) != {name: array.shape for name, array in arrays.items()}:
        raise InputError("these weights belong to another architecture than the model section's", field=str(path))
    return arrays


@dataclass(frozen=True)
class EvaluatedModel:
    """Directory of a model, and its model.json."""

    directory: Path
    description: dict[str, Any]

    @property
    def name(self) -> str:
        """Id of the run that trained it."""
        return str(self.description["run"])

    @property
    def weights(self) -> Path:
        return self.directory / WEIGHTS_FILE

    @property
    def model_section(self) -> ModelSection:
        """Architecture as a section of a run document."""
        return ModelSection.model_validate(self.description["architecture"])

    @property
    def average_weights(self) -> Path | None:
        """Running average of the weights; None if there is none or it is the model itself."""
        average = self.directory / OTHER_WEIGHTS_FILES["trained"]
        return average if self.description["training"].get("weights") == "trained" and average.exists() else None


@dataclass(frozen=True)
class EvaluatedModels:
    """Members of an ensemble in document order, and the single model that they are compared to."""

    members: list[EvaluatedModel]
    baseline: EvaluatedModel | None

    @property
    def same_architecture(self) -> bool:
        """True if all members have one architecture."""
        return all(one.model_section == self.members[0].model_section for one in self.members)


def preprocessing_of(config: RunConfig) -> dict[str, Any]:
    """Return the preprocessing of images that model.json records."""
    return {
        "color": "RGB",
        "image_size": config.eval_image_size,
        "crop_fraction": config.evaluate.crop_fraction,
        "interpolation": config.input.eval_interpolation,
        "per_image_standardization": config.input.per_image_standardization,
        "mean": list(config.input.mean),
        "std": list(config.input.std),
    }


INPUT_OPTIONS = ("image_size", "interpolation", "per_image_standardization", "mean", "std")
"""Options of the input section in a model's preprocessing."""

INFERENCE_OPTIONS = {
    "data": ("policy", "resize_short", "quality", "max_pixels", "max_bytes"),
    "evaluate": ("flip",),
    "train": ("precision", "channels_last", "stem_compute"),
}
"""Options that predictions depend on besides the preprocessing, by section."""


def inference_options_of(config: RunConfig) -> dict[str, Any]:
    """Return the options that model.json records for predictions, by section."""
    return {
        section: {name: getattr(getattr(config, section), name) for name in names}
        for section, names in INFERENCE_OPTIONS.items()
    }


def run_of(model_directory: Path) -> RunDirectory | None:
    """Return the run directory that a model is in; None for a model directory elsewhere."""
    run = RunDirectory(model_directory.resolve().parent)
    return run if model_directory.resolve() == run.model and run.config.exists() else None


def run_document_of(model: EvaluatedModel) -> RunConfig:
    """Return the document of the model's run; outside of a run directory, a document with the options in model.json."""
    run = run_of(model.directory)
    if run is not None:
        return load(run.config)
    preprocessing, inference = model.description["preprocessing"], model.description.get("inference", {})
    values = {
        **inference,
        "input": {name: preprocessing[name] for name in INPUT_OPTIONS if name in preprocessing},
        "model": model.description["architecture"],
        "evaluate": {"crop_fraction": preprocessing["crop_fraction"], **inference.get("evaluate", {})},
    }
    return RunConfig.model_validate(values)


def find_model_directory(path: Path) -> Path:
    """Return `path` if it is the directory of a model, else `path`/model if it is that of a run."""
    return path if (path / MODEL_JSON).exists() or not (path / "model").is_dir() else path / "model"


def read_evaluated_models(config: RunConfig, classes: Sequence[str]) -> EvaluatedModels:
    """Read the models that a document evaluates together; `classes` are those of the shard set, in index order.

    Raises InputError if a model is missing or damaged, or has other classes or preprocessing.
    """
    baseline = config.evaluate.baseline
    members = [read_model(directory) for directory in combined_model_directories(config)]
    single = read_model(resolve_model_directory(config, baseline)) if baseline is not None else None
    models = EvaluatedModels(members, single)
    for model in [*members, *([single] if single else [])]:
        _check_comparable(model, list(classes), preprocessing_of(config))
    if config.evaluate.combine == "weights" and not models.same_architecture:
        raise InputError(
            "the models have different architectures, so their weights have no mean",
            field="evaluate.combine",
            got="weights",
            hint="Choose probabilities or logits.",
        )
    return models


def read_model(directory: Path) -> EvaluatedModel:
    """Read the model in a directory; raises InputError if there is none or its model.json is damaged."""
    path = directory / MODEL_JSON
    try:
        model = EvaluatedModel(directory, dict(json.loads(path.read_text(encoding="utf-8"))))
        if (written := model.description.get("format", MODEL_FORMAT)) != MODEL_FORMAT:
            raise InputError(
                "of another version of Podscale", field=f"{path}: format", got=written, hint="Use that version."
            )
        _ = model.model_section, model.name, model.description["classes"], model.description["training"]
    except FileNotFoundError as error:
        raise InputError(
            "there is no model here",
            field=str(directory),
            hint="Train it first (`podscale collapse` trains the members of an ensemble), or name the directory of a "
            "run or of a model.",
        ) from error
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"not the description of a model ({first_line(error)})"
        raise InputError(problem, field=str(path)) from error
    return model


def check_same_code(directory: Path, config: RunConfig) -> None:
    """Raise InputError if a model of the user's code needs other code than the run that evaluates it.

    Models that are evaluated together share one import path, on which a module's name stands for one file.
    """
    path = directory / MODEL_CODE
    if not path.exists() or not read_model(directory).model_section.name.startswith("python:"):
        return
    if (sha256 := file_sha256(path)) != config.run.code:
        raise InputError(
            "this model has other code than the run that evaluates it",
            field=str(path),
            got=sha256[:16],
            hint="Evaluate it as a run of its own, or install both models as plug-ins.",
        )


def _check_comparable(model: EvaluatedModel, classes: list[str], preprocessing: dict[str, Any]) -> None:
    model_classes = list(model.description["classes"])
    if model_classes != classes:
        pairs = enumerate(zip_longest(model_classes, classes, fillvalue="nothing"))
        index, (name, expected) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        raise InputError(
            f"this model has other classes than the shard set: {len(model_classes)} against {len(classes)}, class "
            f"{index} is {name!r} against {expected!r}",
            field=str(model.directory),
            hint="Predictions of such models cannot be averaged: leave it out.",
        )
    values = {**preprocessing_of(RunConfig()), **model.description["preprocessing"]}  # older models lack newer options
    differences = [f"{key} {values[key]} against {v}" for key, v in preprocessing.items() if values[key] != v]
    if differences:
        raise InputError(
            f"this model needs other preprocessing ({', '.join(differences)}), and all models share one pass over the "
            "images",
            field=str(model.directory),
            hint="Leave it out, or evaluate it as a run of its own.",
        )
