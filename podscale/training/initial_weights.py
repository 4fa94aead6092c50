"""Initial weights of a run (`train.start_from`): from another run, or weights from elsewhere, fitted to the model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from podscale import models
from podscale.config import RunConfig
from podscale.config.identity import add_later_options, differences, result_values
from podscale.data.manifest import classes_sha256
from podscale.data.shard_set import ShardSet
from podscale.errors import InputError
from podscale.models.weight_names import best_mapping, rename, squeezed
from podscale.runs.checkpoint.format import CheckpointEntry, Snapshot, complete_entries, read_snapshot
from podscale.runs.ensemble_members import resolve_run_directory
from podscale.training.fine_tuning import head_names

EPOCH_KEY = "epoch"
"""Key of a checkpoint's metadata: passes over the training split so far."""
EPOCH_BEFORE_KEY = "epoch_before"
"""Key of a checkpoint's metadata: passes before the last step, whose batch may differ from those of other steps."""
MODEL_PREFIX = "model/"
MAX_LISTED = 8
"""Maximum number of names of one kind in an error or a record."""

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class SourceWeights:
    """Weights as their source has them.

    Args:
        arrays: fp32, by the source's names.
        origin: provenance to record, JSON values.
        classes_sha256: hash of the class map; None if the source does not list its classes.
    """

    arrays: Arrays
    origin: dict[str, Any]
    classes_sha256: str | None = None


ReadSource = Callable[[RunConfig], SourceWeights]
"""Reads the weights that `train.start_from.weights` names."""


@dataclass(frozen=True)
class InitialWeights:
    """Initial weights of a run, fitted to its model.

    `arrays` are fp32, by the model spec's names; arrays that are absent keep the model's own initial values.
    `provenance` has `run`, `step` and `epoch` of the checkpoint and `epochs` trained over all earlier runs, or `source`
    and its hash or revision. It lists what was `skipped` and `initialised`.
    """

    arrays: Arrays
    provenance: dict[str, Any]


def load_initial_weights(
    config: RunConfig, shard_set: ShardSet, read_source: ReadSource | None = None
) -> InitialWeights | None:
    """Load the weights named by `train.start_from`, if any. Raises InputError if they do not fit model and classes.

    Args:
        read_source: reader of weights from elsewhere; None if the engine has none.
    """
    start = config.train.start_from
    if start.run is not None:
        source = _read_run(config, start.run)
    elif start.weights is not None:
        assert read_source is not None, "checked with the run document"
        source = read_source(config)
    else:
        return None
    return fit_weights(config, shard_set.classes, source)


def fit_weights(config: RunConfig, classes: Sequence[str], source: SourceWeights) -> InitialWeights:
    """Fit weights to the document's model. Raises InputError for arrays that do not fit, unless they may differ.

    Args:
        classes: class names of the run in index order.
    """
    spec = models.model_spec(config.model, len(classes))
    arrays = _renamed(config, source.arrays, spec.array_shapes)
    fit = _compare(arrays, spec)
    head_arrays = head_names(config.model, len(classes))
    replaces = _replaces_head(config, source, classes, fits=not set(head_arrays) & {*fit.missing, *fit.wrong})
    head = head_arrays if replaces else ()
    fit = Misfit(*([name for name in names if name not in head] for names in fit))
    if any(fit) and config.train.start_from_strict:
        raise _misfit_error(config, fit, arrays, spec.array_shapes)
    skipped = [*(name for name in head if name in arrays), *fit.wrong, *fit.unknown]
    initialised = [name for name in spec.array_shapes if name in (*head, *fit.missing, *fit.wrong)]
    loaded = {name: arrays[name].reshape(s) for name, s in spec.array_shapes.items() if name not in initialised}
    if not loaded:
        raise InputError("no array of these weights fits the model", field=_field(config), got=_label(config))
    report = {
        "loaded": len(loaded),
        "skipped": _listed(skipped),
        "initialised": _listed(initialised),
        "head": "replaced" if replaces else "kept",
    }
    return InitialWeights(loaded, source.origin | report)


class Misfit(NamedTuple):
    """Names of arrays that do not fit a model."""

    missing: list[str]
    wrong: list[str]
    """Of another shape."""
    unknown: list[str]


def _compare(arrays: Arrays, spec: models.ModelSpec) -> Misfit:
    """Compare arrays, by the model's names, with the model."""
    shapes = spec.array_shapes
    return Misfit(
        missing=[name for name in shapes if name not in arrays],
        wrong=[n for n, s in shapes.items() if n in arrays and squeezed(arrays[n].shape) != squeezed(s)],
        unknown=[name for name in arrays if name not in shapes and name not in spec.constants],
    )


def _renamed(config: RunConfig, arrays: Arrays, shapes: Mapping[str, models.Shape]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays by the model's names: by the document's changes, then the known renaming that fits best."""
    names = rename(list(arrays), config.train.start_from.rename)
    known = best_mapping({new: tuple(arrays[name].shape) for name, new in names.items()}, shapes)
    renamed: dict[str, npt.NDArray[Any]] = {}
    for name, new in names.items():
        if (final := known.get(new)) in renamed:
            problem = f"two arrays of these weights become {final}"
            hint = "Change one of their names by train.start_from.rename, or save the model's weights alone."
            raise InputError(problem, field=_field(config), got=_label(config), hint=hint)
        if final is not None:
            renamed[final] = np.asarray(arrays[name], np.float32)
    return renamed


def _replaces_head(config: RunConfig, source: SourceWeights, classes: Sequence[str], *, fits: bool) -> bool:
    """Return True if the classifier starts anew. Raises InputError if it is to be kept and cannot be.

    Args:
        fits: the source has a classifier of the model's shape.
    """
    choice = config.train.head
    if choice == "replace":
        return True
    differs = not fits if source.classes_sha256 is None else source.classes_sha256 != classes_sha256(list(classes))
    if choice == "keep" and differs:
        raise InputError(
            "these weights have other classes, or another order of them, than the shard set",
            field="train.head",
            got="keep",
            hint="Start from a model of the same classes, or set train.head=replace.",
        )
    return choice == "auto" and differs


def _misfit_error(config: RunConfig, fit: Misfit, arrays: Arrays, shapes: Mapping[str, models.Shape]) -> InputError:
    """Return the error that lists the arrays that do not fit."""
    wrong = [f"{name} {list(arrays[name].shape)} instead of {list(shapes[name])}" for name in fit.wrong]
    kinds = {"missing": fit.missing, "of another shape": wrong, "unknown to the model": fit.unknown}
    lines = [f"  {len(names)} {kind}: {', '.join(_listed(names))}" for kind, names in kinds.items() if names]
    return InputError(
        f"these weights do not fit {config.model.name}:\n" + "\n".join(lines),
        field=_field(config),
        got=_label(config),
        hint="Name weights of this model, rename their arrays (train.start_from.rename), or set "
        "train.start_from_strict=false to load what fits.",
    )


def _listed(names: Iterable[str]) -> list[str]:
    """Return the first names, and the number of the others."""
    names = list(names)
    return [*names[:MAX_LISTED], *([f"{len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else [])]


def _field(config: RunConfig) -> str:
    return "train.start_from.run" if config.train.start_from.run is not None else "train.start_from.weights"


def _label(config: RunConfig) -> str | None:
    return config.train.start_from.run or config.train.start_from.weights


def _read_run(config: RunConfig, name: str) -> SourceWeights:
    """Read the weights of a run's checkpoint. Raises InputError if there is none, or of another model."""
    start, run = config.train.start_from, resolve_run_directory(config, name)
    entries = complete_entries(run.checkpoints)
    if not entries:
        raise InputError(
            f"there is no complete checkpoint in {run.checkpoints}",
            field="train.start_from.run",
            got=name,
            hint="Train that run first.",
        )
    entry = entries[0] if start.epoch is None else entry_of_epoch(entries, start.epoch, name)
    saved = entry.manifest.identity
    options = _model_options(result_values(config))
    conflicts = differences(add_later_options(_model_options(saved.result), options), options)
    if conflicts:
        listing = "\n".join(f"  {conflict}" for conflict in conflicts)
        raise InputError(f"these weights belong to another model:\n{listing}", field=str(entry.path))
    try:
        snapshot = read_snapshot(entry)
    except ValueError as error:
        raise InputError(f"this checkpoint cannot be used: {error}", field=str(entry.path)) from None
    arrays = {
        name.removeprefix(MODEL_PREFIX): array
        for name, array in snapshot.arrays.items()
        if name.startswith(MODEL_PREFIX)
    }
    return SourceWeights(arrays, _provenance(name, snapshot), saved.classes_sha256)


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
