"""Run document of several models that are evaluated together without a training of their own."""

from collections.abc import Sequence
from pathlib import Path

from podscale.config import RunConfig, dumps, fingerprint, loads
from podscale.config.document import Overrides
from podscale.config.ensemble import EnsembleSection
from podscale.config.run import ClaimSection
from podscale.config.start import StartSection
from podscale.errors import InputError
from podscale.runs.model_files import find_model_directory, read_model, run_document_of, run_of
from podscale.runs.user_code import code_of_model


def adhoc_ensemble_document(names: Sequence[str], changes: Overrides, shard_set: str | None) -> RunConfig:
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
    directories = [find_model_directory(Path(name)) for name in names]
    first = _training_document(directories[0], shard_set)
    paths = [str(directory) for directory in directories]
    code = code_of_model(directories[0], first)
    changed = {"id": f"together-{fingerprint({'models': paths})[:8]}", "code": code.sha256 if code else None}
    run = first.run.model_copy(update=changed)
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


def _training_document(directory: Path, shard_set: str | None) -> RunConfig:
    if run_of(directory) is None and shard_set is None:
        problem = "this model is outside of a run directory, so its shard set is not known"
        raise InputError(problem, field=str(directory), hint="Name it with --shard-set")
    return run_document_of(read_model(directory))
