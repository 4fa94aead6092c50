"""Initial weights from another run (`train.start_from`), and export of the final model (safetensors, model.json)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors.numpy import save

from podscale import models
from podscale.config import RunConfig
from podscale.config.identity import add_later_options, differences, result_values
from podscale.data.shard_set import ShardSet
from podscale.errors import InputError
from podscale.runs.checkpoint.format import CheckpointEntry, Snapshot, complete_entries, read_snapshot
from podscale.runs.ensemble_members import MODEL_JSON, resolve_run_directory
from podscale.runs.model_files import (
    MODEL_FORMAT,
    OTHER_WEIGHTS_FILES,
    WEIGHTS_FILE,
    inference_options_of,
    preprocessing_of,
)
from podscale.training.run_progress import RunProgress
from podscale.util.files import write_atomically, write_json

EPOCH_KEY = "epoch"
"""Key of a checkpoint's metadata: passes over the training split so far."""
EPOCH_BEFORE_KEY = "epoch_before"
"""Key of a checkpoint's metadata: passes before the last step, whose batch may differ from those of other steps."""
MODEL_PREFIX = "model/"


@dataclass(frozen=True)
class InitialWeights:
    """Initial weights of a run, from a checkpoint of another run.

    `arrays` are fp32, by the model spec's names. `provenance` has `run`, `step` and `epoch` of the checkpoint, and
    `epochs` trained over all earlier runs.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    provenance: dict[str, Any]


def load_initial_weights(config: RunConfig, shard_set: ShardSet) -> InitialWeights | None:
    """Load the weights named by `train.start_from`, if any. Raises InputError if they do not fit model and classes."""
    start = config.train.start_from
    if start.run is None:
        return None
    run = resolve_run_directory(config, start.run)
    entries = complete_entries(run.checkpoints)
    if not entries:
        raise InputError(
            f"there is no complete checkpoint in {run.checkpoints}",
            field="train.start_from.run",
            got=start.run,
            hint="Train that run first.",
        )
    entry = entries[0] if start.epoch is None else entry_of_epoch(entries, start.epoch, start.run)
    saved = entry.manifest.identity
    options = _model_options(result_values(config))
    conflicts = differences(add_later_options(_model_options(saved.result), options), options)
    if conflicts:
        listing = "\n".join(f"  {conflict}" for conflict in conflicts)
        raise InputError(f"these weights belong to another model:\n{listing}", field=str(entry.path))
    if saved.classes_sha256 != shard_set.manifest.classes_sha256:
        raise InputError(
            f"these weights have other classes, or another order of them, than the shard set {shard_set.directory}",
            field=str(entry.path),
            hint="Start from a run on the same classes.",
        )
    try:
        snapshot = read_snapshot(entry)
    except ValueError as error:
        raise InputError(f"this checkpoint cannot be used: {error}", field=str(entry.path)) from None
    arrays = {
        name.removeprefix(MODEL_PREFIX): array
        for name, array in snapshot.arrays.items()
        if name.startswith(MODEL_PREFIX)
    }
    # Check names and shapes too: an option that the saving version did not have may change them.
    spec = models.model_spec(config.model, len(shard_set.classes))
    expected_shapes = spec.array_shapes
    if {name: array.shape for name, array in arrays.items()} != expected_shapes:
        raise InputError("these weights have other names or shapes than this model", field=str(entry.path))
    return InitialWeights(arrays, _provenance(start.run, snapshot))


def entry_of_epoch(entries: list[CheckpointEntry], epoch: float, run: str) -> CheckpointEntry:
    """Return the checkpoint of an epoch: the one after the first step that ends at or after it."""
    candidates = [
        (float(entry.manifest.meta[EPOCH_KEY]), entry) for entry in entries if EPOCH_KEY in entry.manifest.meta
    ]
    for entry_epoch, entry in candidates:
        of_equal_steps = entry_epoch - entry_epoch / entry.step  # before phases could change the batch
        if entry.manifest.meta.get(EPOCH_BEFORE_KEY, of_equal_steps) + 1e-6 < epoch <= entry_epoch + 1e-6:
            return entry
    listing = ", ".join(f"{entry_epoch:g}" for entry_epoch, _ in sorted(candidates, key=lambda pair: pair[0]))
    raise InputError(
        f"run {run} has no checkpoint of this epoch, only of epochs {listing or 'unknown'}",
        field="train.start_from.epoch",
        got=epoch,
        hint="Name one of these, or train it with that epoch in checkpoint.snapshots.",
    )


def _model_options(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name.startswith("model.")}


def _provenance(run: str, snapshot: Snapshot) -> dict[str, Any]:
    epoch = float(snapshot.meta.get(EPOCH_KEY, 0.0))
    before = float(snapshot.meta.get("progress", {}).get("origin", {}).get("epochs", 0.0))
    return {"run": run, "step": snapshot.step, "epoch": epoch, "epochs": round(before + epoch, 6)}


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
