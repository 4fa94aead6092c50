"""Model files of a finished run, and checks on models that are evaluated together.

The weights are one safetensors file with the catalogue's names, the same for every engine. Models that know other
classes or preprocess images in another way are refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors.numpy import load_file

from podscale.config import ModelSection, RunConfig
from podscale.errors import InputError
from podscale.runs.ensemble_members import MODEL_JSON, combined_model_directories, resolve_model_directory

WEIGHTS_FILE = "model.safetensors"
OTHER_WEIGHTS_FILES = {"trained": "ema.safetensors", "ema": "trained.safetensors"}
"""The other weights that a run kept, by which of them are the model (evaluate.weights)."""


def read_weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, npt.NDArray[Any]]:
    """Parameters and running statistics by name; `shapes`: of all that the network owns.

    Raises InputError if the file is missing or holds another architecture.
    """
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
    """One model: its directory, and the contents of its model.json."""

    directory: Path
    description: dict[str, Any]

    @property
    def name(self) -> str:
        """The run that trained it."""
        return str(self.description["run"])

    @property
    def weights(self) -> Path:
        return self.directory / WEIGHTS_FILE

    @property
    def model_section(self) -> ModelSection:
        """The architecture as a section of a run document."""
        return ModelSection.model_validate(self.description["architecture"])

    @property
    def average_weights(self) -> Path | None:
        """The running average of the weights, if the run kept one and it is not the model itself."""
        beside = self.directory / OTHER_WEIGHTS_FILES["trained"]
        return beside if self.description["training"].get("weights") == "trained" and beside.exists() else None


@dataclass(frozen=True)
class EvaluatedModels:
    """members: at least two, in the order of the document. baseline: the single model set beside them."""

    members: list[EvaluatedModel]
    baseline: EvaluatedModel | None

    @property
    def same_architecture(self) -> bool:
        """Return whether all members have one architecture, so that their weights have a mean."""
        return all(one.model_section == self.members[0].model_section for one in self.members)


def preprocessing_of(config: RunConfig) -> dict[str, Any]:
    """Preprocessing of images for a document's model, as model.json records it."""
    return {
        "color": "RGB",
        "image_size": config.eval_image_size,
        "crop_fraction": config.evaluate.crop_fraction,
        "mean": list(config.input.mean),
        "std": list(config.input.std),
    }


def read_evaluated_models(config: RunConfig, classes: Sequence[str]) -> EvaluatedModels:
    """Read the models that a document evaluates together. classes: of the shard set, in index order.

    Raises InputError for a model that is missing or damaged, that knows other classes, or that wants its images
    prepared in another way.
    """
    baseline = config.evaluate.baseline
    members = [read_model(directory) for directory in combined_model_directories(config)]
    found = EvaluatedModels(
        members, read_model(resolve_model_directory(config, baseline)) if baseline is not None else None
    )
    for one in [*members, *([found.baseline] if found.baseline else [])]:
        _check_comparable(one, list(classes), preprocessing_of(config))
    if config.evaluate.combine == "weights" and not found.same_architecture:
        raise InputError(
            "the models have different architectures, so their weights have no mean",
            field="evaluate.combine",
            got="weights",
            hint="Choose probabilities or logits.",
        )
    return found


def read_model(directory: Path) -> EvaluatedModel:
    """Read the model in a directory; raises InputError if there is none or its model.json is damaged."""
    path = directory / MODEL_JSON
    try:
        listed = EvaluatedModel(directory, json.loads(path.read_text(encoding="utf-8")))
        _ = listed.model_section, listed.name, listed.description["classes"], listed.description["training"]
    except FileNotFoundError as error:
        raise InputError(
            "there is no model here",
            field=str(directory),
            hint="Train it first (`podscale collapse` trains the members of an ensemble), or name the directory of a "
            "run or of a model.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"not the description of a model ({str(error).splitlines()[0]})"
        raise InputError(problem, field=str(path)) from error
    return listed


def _check_comparable(one: EvaluatedModel, classes: list[str], prepared: dict[str, Any]) -> None:
    theirs = list(one.description["classes"])
    if theirs != classes:
        pairs = [i for i, (a, b) in enumerate(zip(theirs, classes, strict=False)) if a != b]
        at = pairs[0] if pairs else min(len(theirs), len(classes))
        mine, wanted = (names[at] if at < len(names) else "nothing" for names in (theirs, classes))
        raise InputError(
            f"this model has other classes than the shard set: {len(theirs)} against {len(classes)}, class {at} is "
            f"{mine!r} against {wanted!r}",
            field=str(one.directory),
            hint="Answers of such models cannot be averaged: leave it out.",
        )
    different = {key: one.description["preprocessing"].get(key) for key in prepared}
    different = {key: value for key, value in different.items() if value != prepared[key]}
    if different:
        told = ", ".join(f"{key} {value} against {prepared[key]}" for key, value in different.items())
        raise InputError(
            f"this model needs its images prepared in another way ({told}), and one pass over the images feeds all",
            field=str(one.directory),
            hint="Leave it out, or evaluate it as a run of its own.",
        )
