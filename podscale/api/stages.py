"""Stages of a run in this process: `shard`, `train`, `evaluate` and `write_report`."""

from collections.abc import Callable, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from podscale.api.documents import Document, load, load_document
from podscale.api.results import Run
from podscale.config import RunConfig
from podscale.config.document import Overrides
from podscale.data.manifest import WHOLE_SHARD_SET, ShardPart
from podscale.errors import InputError, PodscaleError
from podscale.runs import dataset_directory, stage_outcomes
from podscale.stages import local
from podscale.stages.local import ShardResult
from podscale.util.progress_reports import ProgressCallback, ProgressUpdate
from podscale.util.terminal import LineStream, progress_callback

if TYPE_CHECKING:
    from podscale.evaluation.evaluation_json import Evaluation
    from podscale.launch.log_display import StageOutput

ShardSetName = str | PathLike[str] | ShardResult
"""Shard set: a directory, an fsspec URL, or the result of `shard`."""
MetricsCallback = Callable[[dict[str, Any]], None]
"""Function that gets each new record of a run's metrics."""


def shard(
    document: Document | None = None,
    *,
    workers: int = 0,
    verify: bool = False,
    progress: bool | Callable[[ProgressUpdate], None] = False,
    **overrides: Any,
) -> ShardResult:
    """Pack the images of a run document into a shard set. Finished shards are not packed again.

    Args:
        document: path, name of a preset, values by section, or a loaded document; None: the preset `digits`.
        workers: packing processes; 0: `launch.shard_workers`.
        verify: read every shard again and check its hash.
        progress: show the progress on standard error; or a function that gets each update.
        overrides: options by section, or by dotted name.

    Returns:
        The shard set: `location`, `images` by split, `manifest`, and whether it was complete before.

    Raises:
        InputError: The images or the workspace are unusable.
    """
    config = load(document, **overrides)
    callback, messages = progress_callback(progress), None if progress is True else LineStream()
    result = shard_part(config, WHOLE_SHARD_SET, workers=workers, verify=verify, progress=callback, messages=messages)
    if result is None:
        raise PodscaleError(
            "the set is not complete, because other processes still pack parts of it",
            field=dataset_directory(config.run.workspace, config.data),
            hint="Call podscale.shard again when they have ended.",
        )
    return result


def shard_part(
    config: RunConfig,
    part: ShardPart,
    *,
    workers: int = 0,
    verify: bool = False,
    progress: ProgressCallback | None = None,
    messages: TextIO | None = None,
) -> ShardResult | None:
    """Pack one part of a shard set; returns None if other parts are missing."""
    from podscale.config.preflight import preflight

    preflight(config, "pack")
    return local.shard(
        config.data,
        config.run.workspace,
        part,
        workers=workers or config.launch.shard_workers,
        verify=verify,
        progress=progress,
        telemetry=local.ExportedTelemetry.for_config(config),
        messages=messages,
    )


def train(
    document: Document | None = None,
    *,
    shard_set: ShardSetName | None = None,
    progress: bool | MetricsCallback = False,
    **overrides: Any,
) -> Run:
    """Train on a finished shard set, or resume an interrupted training. A finished one is not repeated.

    The ranks are processes of their own, so a script needs no `if __name__ == "__main__"`. Ctrl-C and SIGTERM save a
    checkpoint first if the call is made from the main thread.

    Args:
        document: path, name of a preset, values by section, or a loaded document; None: the preset `digits`.
        shard_set: directory or fsspec URL of the shards; None: the set that `podscale.shard` builds.
        progress: print the step log; or a function that gets each record of the metrics.
        overrides: options by section, or by dotted name.

    Raises:
        PodscaleError: The error of the ranks; Preempted after a stop that saved, HangDetected, or PeerLost.
    """
    config, location = load_with_shard_set(document, overrides, shard_set)
    local.train(config, location, _stage_output(config, progress))
    return Run(config)


def evaluate(
    document: Document | Sequence[str | PathLike[str]] | None = None,
    *,
    shard_set: ShardSetName | None = None,
    progress: bool | MetricsCallback = False,
    **overrides: Any,
) -> "Evaluation":
    """Evaluate the trained model of a run on every validation image, or several models together.

    Args:
        document: path, name of a preset, values by section, or a loaded document; None: the preset `digits`. A list
            of two or more directories of runs or models evaluates their ensemble.
        shard_set: directory or fsspec URL of the shards; None: the set of the document.
        progress: print the progress; or a function that gets each record of the metrics.
        overrides: options by section, or by dotted name.

    Returns:
        The document evaluation.json: `scores` (top1, top5, loss, ece), `per_class`, `confused`, `calibration`.
    """
    if isinstance(document, Sequence) and not isinstance(document, str):
        config, location = load_ensemble(document, overrides, shard_set)
    else:
        config, location = load_with_shard_set(document, overrides, shard_set)
    local.evaluate(config, location, _stage_output(config, progress))
    return Run(config).evaluation


def write_report(
    document: Document | None = None,
    *,
    shard_set: ShardSetName | None = None,
    **overrides: Any,
) -> Run:
    """Write report.html and the model card of a run.

    Args:
        document: path, name of a preset, values by section, or a loaded document; None: the preset `digits`.
        shard_set: directory or fsspec URL of the shards; None: the set of the document.
        overrides: options by section, or by dotted name.
    """
    config, location = load_with_shard_set(document, overrides, shard_set)
    local.report(config, location)
    return Run(config)


def load_with_shard_set(
    document: Document | None, changes: Overrides = (), shard_set: ShardSetName | None = None
) -> tuple[RunConfig, str]:
    """Return the document and the location of its shards, by default the set that `shard` builds."""
    config = load_document(document, changes)
    stage_outcomes.check_run_document(config)
    return config, _location_of(shard_set) or dataset_directory(config.run.workspace, config.data)


def load_ensemble(
    names: Sequence[str | PathLike[str]], changes: Overrides = (), shard_set: ShardSetName | None = None
) -> tuple[RunConfig, str]:
    """Return the document that evaluates the models of several directories, and the location of its shards."""
    from podscale.evaluation.adhoc_ensemble import adhoc_ensemble_document

    paths = [fspath(name) for name in names]
    if (missing := next((path for path in paths if not Path(path).is_dir()), None)) is not None:
        hint = "Name a model by its directory or that of its run."
        raise InputError("there is no such directory", field=missing, hint=hint)
    location = _location_of(shard_set)
    config = adhoc_ensemble_document(paths, changes, location)
    stage_outcomes.check_run_document(config)
    return config, location or dataset_directory(config.run.workspace, config.data)


def _location_of(shard_set: ShardSetName | None) -> str | None:
    if shard_set is None:
        return None
    return shard_set.location if isinstance(shard_set, ShardResult) else fspath(shard_set)


def _stage_output(config: RunConfig, progress: bool | MetricsCallback) -> "StageOutput":
    from podscale.launch.log_display import StageOutput

    if callable(progress):
        return StageOutput.silent(progress)
    return StageOutput.printed(config.telemetry) if progress else StageOutput.silent()
