"""Run document of several models that are evaluated together without a training of their own."""

from collections.abc import Sequence
from pathlib import Path

from podscale.config import RunConfig, dumps, fingerprint, load, loads
from podscale.config.ensemble import EnsembleSection
from podscale.config.run import ClaimSection
from podscale.config.start import StartSection
from podscale.errors import InputError
from podscale.runs import RunDirectory
from podscale.runs.ensemble_members import MODEL_JSON
from podscale.runs.model_files import read_model

INPUT_OPTIONS = ("image_size", "interpolation", "per_image_standardization", "mean", "std")
"""Options of the input section in a model's preprocessing."""


def adhoc_ensemble_document(names: Sequence[str], changes: Sequence[str], shard_set: str | None) -> RunConfig:
    """Build the run document of an ensemble from directories of runs or models.

    Workspace and options are those of the first model's run. Outside of a run directory, they are in model.json.

    Raises:
        InputError: Fewer than two models, or the first is outside of a run directory and `shard_set` is None.
    """
    if len(names) < 2:
        raise InputError(
            "an ensemble of one is a single model",
            field=names[0],
            hint="Name two or more models, or a run document to evaluate the model of a run.",
        )
    directories = [_model_directory(Path(name)) for name in names]
    first = _training_document(directories[0], shard_set)
    paths = [str(directory) for directory in directories]
    run = first.run.model_copy(update={"id": f"together-{fingerprint({'models': paths})[:8]}"})
    train = first.train.model_copy(update={"phases": (), "start_from": StartSection(), "target_top1": None})
    config = first.model_copy(
        update={
            "run": run,
            "train": train,
            "ensemble": EnsembleSection(),
            "evaluate": first.evaluate.model_copy(update={"models": tuple(paths), "weights": "trained"}),
            "checkpoint": first.checkpoint.model_copy(update={"snapshots": ()}),
            "telemetry": first.telemetry.model_copy(update={"mlperf_log": False}),
            "claim": ClaimSection(),
        }
    )
    return loads(dumps(config), " ".join(names), changes)


def _model_directory(path: Path) -> Path:
    return path if (path / MODEL_JSON).exists() or not (path / "model").is_dir() else path / "model"


def _training_document(directory: Path, shard_set: str | None) -> RunConfig:
    run = RunDirectory(directory.resolve().parent)
    if directory.name == "model" and run.config.exists():
        return load(run.config)
    if shard_set is None:
        problem = "this model is outside of a run directory, so its shard set is not known"
        raise InputError(problem, field=str(directory), hint="Name it with --shard-set")
    description = read_model(directory).description
    preprocessing = description["preprocessing"]
    values = {
        "input": {name: preprocessing[name] for name in INPUT_OPTIONS if name in preprocessing},
        "model": description["architecture"],
        "evaluate": {"crop_fraction": preprocessing["crop_fraction"]},
    }
    return RunConfig.model_validate(values)
