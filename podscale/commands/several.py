"""The run document of models that a person names on the command line, to be evaluated together."""

from collections.abc import Sequence
from pathlib import Path

from podscale.config import RunConfig, dumps, fingerprint, load, loads
from podscale.config.ensemble import EnsembleSection, StartSection
from podscale.config.run import ClaimSection
from podscale.errors import InputError
from podscale.runs import RunDirectory
from podscale.runs.ensemble_members import MODEL_JSON
from podscale.runs.model_files import read_model


def adhoc_ensemble_document(names: Sequence[str], changes: Sequence[str], shard_set: str | None) -> RunConfig:
    """A run without a training of its own, named after its models, in the workspace of the first one's run.

    What it needs besides the models it takes from the document of that run; for a model that lies alone, from its
    model.json, and the shard set must be named. Raises InputError for fewer than two models.
    """
    if len(names) < 2:
        raise InputError(
            "an ensemble of one is a single model",
            field=names[0],
            hint="Name two models or more, or a run document to evaluate the model of a run.",
        )
    directories = [_resolve_model(Path(name)) for name in names]
    first = _training_document(directories[0], shard_set)
    paths = [str(directory) for directory in directories]
    identity = first.run.model_copy(update={"id": f"together-{fingerprint({'models': paths})[:8]}"})
    train = first.train.model_copy(update={"phases": (), "start_from": StartSection(), "target_top1": None})
    config = first.model_copy(
        update={
            "run": identity,
            "train": train,
            "ensemble": EnsembleSection(),
            "evaluate": first.evaluate.model_copy(update={"models": tuple(paths), "weights": "trained"}),
            "checkpoint": first.checkpoint.model_copy(update={"snapshots": ()}),
            "telemetry": first.telemetry.model_copy(update={"mlperf_log": False}),
            "claim": ClaimSection(),
        }
    )
    return loads(dumps(config), " ".join(names), changes)


def _resolve_model(path: Path) -> Path:
    return path if (path / MODEL_JSON).exists() or not (path / "model").is_dir() else path / "model"


def _training_document(directory: Path, shard_set: str | None) -> RunConfig:
    run = RunDirectory(directory.resolve().parent)
    if directory.name == "model" and run.config.exists():
        return load(run.config)
    if shard_set is None:
        raise InputError(
            "this model lies outside of a run directory, so nothing names the images it is for",
            field=str(directory),
            hint="Name them with --shard-set",
        )
    told = read_model(directory).description
    prepared = told["preprocessing"]
    values = {
        "input": {"image_size": prepared["image_size"], "mean": prepared["mean"], "std": prepared["std"]},
        "model": told["architecture"],
        "evaluate": {"crop_fraction": prepared["crop_fraction"]},
    }
    return RunConfig.model_validate(values)
