"""What a run directory already holds: whose document it is, and which stages are finished for the same inputs."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from podscale.config import RunConfig, differences, dumps, load, result_values
from podscale.config.identity import fingerprint
from podscale.ensemble import DESCRIPTION, evaluated_models, evaluated_together
from podscale.errors import InputError
from podscale.files import write_atomically, write_json
from podscale.rundir import RunDirectory, local_path, read_outcomes
from podscale.rundir.outcome import Outcome, Stage
from podscale.shards.manifest import NAME

STAGES: tuple[Stage, ...] = get_args(Stage)


def refuse_other_document(config: RunConfig) -> RunDirectory:
    """The run directory of this document; nothing is written.

    Raises InputError where it holds the run of a document with other `result` fields, listing them.
    """
    run = RunDirectory.of(config)
    if not run.config.exists():
        return run
    changed = differences(result_values(load(run.config)), result_values(config))
    if changed:
        listing = "\n".join(f"  {change}" for change in changed)
        raise InputError(
            f"holds the run of another document. These options change the numbers and differ:\n{listing}\n",
            field=str(run.path),
            hint="Choose another name with --set run.id=..., or move the former run aside with --fresh, or go back to "
            f"the former values (they are in {run.config}).",
        )
    return run


def open_run(config: RunConfig) -> RunDirectory:
    """As `refuse_other_document`, then makes the run directory and records the resolved document in it."""
    run = refuse_other_document(config).create()
    try:
        write_atomically(run.config, dumps(config))
    except OSError as error:
        raise InputError(f"cannot write the run directory: {error.strerror}", field=str(run.path)) from error
    return run


def set_aside(config: RunConfig) -> Path | None:
    """Moves the run directory aside, so that this launch starts anew; nothing is deleted.

    The lease, which the caller holds, stays: whoever still writes for the former run finds another number in it.
    Returns where the former run is now, or None where there was none.
    """
    run = RunDirectory.of(config)
    if all(path == run.lease for path in run.path.iterdir()):
        return None
    moved = run.path.with_name(f"{run.path.name}.{datetime.now(UTC):%Y%m%dT%H%M%S}")
    try:
        run.path.rename(moved)
        run.path.mkdir()
        (moved / run.lease.name).rename(run.lease)
    except OSError as error:
        raise InputError(f"cannot be moved aside: {error.strerror}", field=str(run.path)) from error
    return moved


def finished(config: RunConfig, stage: Stage, shard_set: str) -> Outcome | None:
    """The recorded outcome of `stage` where it is done, was given the same inputs and left its products."""
    run = RunDirectory.of(config)
    outcome = read_outcomes(run.outcome).get(stage)
    if outcome is None or not outcome.done or not all(path.exists() for path in _products(run, stage)):
        return None
    return outcome if _read_marks(run).get(stage) == inputs_mark(config, stage, shard_set) else None


def mark_finished(config: RunConfig, stage: Stage, shard_set: str) -> None:
    """Remembers what `stage` was given, for `finished`."""
    run = RunDirectory.of(config)
    write_json(_marks(run), {**_read_marks(run), stage: inputs_mark(config, stage, shard_set)})


def forget(config: RunConfig, stage: Stage) -> None:
    """Drops the outcomes of `stage` and of the stages after it: they are about to be done again."""
    run = RunDirectory.of(config)
    stale = STAGES[STAGES.index(stage) :]
    kept = {name: entry for name, entry in _read_json(run.outcome).items() if name not in stale}
    write_json(run.outcome, kept)


def inputs_mark(config: RunConfig, stage: Stage, shard_set: str) -> str:
    """A hash of everything that a stage's product depends on."""
    run = RunDirectory.of(config)
    values = config.model_dump(mode="json") if stage == "report" else result_values(config)
    consumed = {
        "shard": [],
        "train": [],
        "evaluate": [file for directory in evaluated_models(config) for file in _model_files(directory)],
        "report": [run.evaluation, run.predictions, *_model_files(run.model)],
    }[stage]
    if stage == "evaluate" and evaluated_together(config):
        values = {**values, "evaluate.combine": config.evaluate.combine, "evaluate.baseline": config.evaluate.baseline}
    return fingerprint({"values": values, "shards": _manifest_hash(shard_set), "files": [_stamp(f) for f in consumed]})


def _model_files(directory: Path) -> list[Path]:
    """All that an answer of a model comes from: its description, its weights, and those that it was left with besides
    (a running average)."""
    return [directory / DESCRIPTION, *sorted(directory.glob("*.safetensors"))]


def _products(run: RunDirectory, stage: Stage) -> list[Path]:
    return {
        "shard": [],
        "train": [run.model / "model.safetensors", run.model / "model.json"],
        "evaluate": [run.evaluation, run.predictions],
        "report": [run.report],
    }[stage]


def _manifest_hash(shard_set: str) -> str:
    if "://" in shard_set and not shard_set.startswith("file://"):
        return shard_set  # remote sets are named by the fingerprint of their data
    try:
        return hashlib.sha256((local_path(shard_set) / NAME).read_bytes()).hexdigest()
    except OSError:
        return ""


def _stamp(path: Path) -> list[str | int]:
    try:
        stat = path.stat()
    except OSError:
        return [path.name]
    return [path.name, stat.st_size, stat.st_mtime_ns]


def _marks(run: RunDirectory) -> Path:
    return run.path / "stages.json"


def _read_marks(run: RunDirectory) -> dict[str, str]:
    return _read_json(_marks(run))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
