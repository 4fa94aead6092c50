"""The weights of another run that a new one begins with (train.start_from).

The final model: weights as safetensors, and beside them what it takes to use them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors.numpy import save

from podscale import models
from podscale.config import RunConfig
from podscale.config.identity import differences, result_values
from podscale.data.shard_set import ShardSet
from podscale.errors import InputError
from podscale.runs.checkpoint.format import CheckpointEntry, Snapshot, complete_entries, read_snapshot
from podscale.runs.ensemble_members import MODEL_JSON, resolve_run_directory
from podscale.runs.model_files import OTHER_WEIGHTS_FILES, WEIGHTS_FILE, preprocessing_of
from podscale.training.run_progress import RunProgress
from podscale.util.files import write_atomically, write_json

EPOCH_KEY = "epoch"
"""In the meta of a checkpoint: the passes over the training split that it is after."""
MODEL_PREFIX = "model/"


@dataclass(frozen=True)
class InitialWeights:
    """arrays: weights and statistics by the catalogue's names, fp32. provenance: where they are from, for progress,
    model card and report: `run`, `step`, `epoch` (there), `epochs` (trained before, over all runs that led there)."""

    arrays: Mapping[str, npt.NDArray[Any]]
    provenance: dict[str, Any]


def load_initial_weights(config: RunConfig, shard_set: ShardSet) -> InitialWeights | None:
    """What a run begins with that has no checkpoint of its own yet; None where with initial weights.

    Raises InputError where there is no such checkpoint, or it is of another model or of other classes.
    """
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
    entry = entries[0] if start.epoch is None else _entry_of_epoch(entries, start.epoch, start.run)
    saved = entry.manifest.identity
    known, wanted = _model_options(saved.result), _model_options(result_values(config))
    conflicts = differences(known, {name: value for name, value in wanted.items() if name in known})
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
        name.removeprefix(MODEL_PREFIX): a for name, a in snapshot.arrays.items() if name.startswith(MODEL_PREFIX)
    }
    # Names and shapes too, because an option that the saving version did not know may change them.
    spec = models.model_spec(config.model, len(shard_set.classes))
    wants = {p.name: p.shape for p in spec.parameters} | {b.name: b.shape for b in spec.buffers}
    if {name: array.shape for name, array in arrays.items()} != wants:
        raise InputError("these weights have other names or shapes than this model", field=str(entry.path))
    return InitialWeights(arrays, _provenance(start.run, snapshot))


def _entry_of_epoch(entries: list[CheckpointEntry], epoch: float, run: str) -> CheckpointEntry:
    """The checkpoint of an epoch: the first one that has seen all of it, less than an update later."""
    known = [(float(entry.manifest.meta[EPOCH_KEY]), entry) for entry in entries if EPOCH_KEY in entry.manifest.meta]
    for at, entry in known:
        if -1e-6 <= at - epoch < at / entry.step - 1e-6:
            return entry
    kept = ", ".join(f"{at:g}" for at, _ in sorted(known, key=lambda pair: pair[0]))
    raise InputError(
        f"run {run} keeps no checkpoint of it, only those of epochs {kept or 'unknown'}",
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


MODEL_FORMAT = "podscale-model-1"

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class TrainedModel:
    """What is exported beside the weights."""

    config: RunConfig
    classes: list[str]
    progress: RunProgress


def export_model(arrays: Arrays, trained: TrainedModel, directory: Path, other_arrays: Arrays | None = None) -> None:
    """Writes a model's fp32 weights and buffers under torchvision's names.

    other_arrays: where a running average of the weights was kept, those of the two that are not the model. model.json
    is written last, so its presence means complete.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / WEIGHTS_FILE, save(dict(arrays), metadata={"format": "pt"}))
    if other_arrays is not None:
        other = directory / OTHER_WEIGHTS_FILES[trained.config.evaluate.weights]
        write_atomically(other, save(dict(other_arrays), metadata={"format": "pt"}))
    write_json(directory / MODEL_JSON, describe_model(trained))


def describe_model(trained: TrainedModel) -> dict[str, Any]:
    """The content of model.json: architecture, classes, preprocessing, how it was trained."""
    config, progress = trained.config, trained.progress
    return {
        "format": MODEL_FORMAT,
        "run": config.run.id,
        "architecture": config.model.model_dump(mode="json"),
        "parameters": models.model_spec(config.model, len(trained.classes)).num_parameters,
        "classes": trained.classes,
        "preprocessing": preprocessing_of(config),
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
