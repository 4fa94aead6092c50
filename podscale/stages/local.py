"""Stages of a run in this process or pod, one function each; pipeline components and CLI commands call them.

Each stage writes its outcome for the exit handler (`outcome.json` of the run; beside the shard set for shards) and is
skipped if its inputs are unchanged and its result exists. The engines and the packer are imported inside the functions,
so that a launcher pod needs no framework.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from podscale.config import RunConfig
from podscale.config.data import DataSection
from podscale.config.preflight import preflight
from podscale.config.telemetry import TelemetrySection
from podscale.data.manifest import ShardSetManifest
from podscale.data.sharding.pack_progress import NULL_OBSERVER, BuildObserver
from podscale.errors import ExitCode, InputError, error_from_exit_code
from podscale.runs import (
    Lease,
    RunDirectory,
    StageOutcome,
    dataset_directory,
    ensemble_members,
    local_path,
    read_outcomes,
    record_stage,
    stage_outcomes,
    write_outcome,
)
from podscale.util import env
from podscale.util.progress_reports import ProgressCallback

if TYPE_CHECKING:
    from podscale.launch.stage_result import StageResult


@dataclass(frozen=True)
class ShardResult:
    """Complete shard set: location, manifest, and whether it existed before."""

    location: str
    manifest: ShardSetManifest
    reused: bool
    messages: tuple[str, ...] = ()
    """Notices for the user, one sentence each."""


@dataclass(frozen=True)
class ExportedTelemetry:
    """Telemetry settings of a run for a stage that does not receive the whole document.

    Args:
        run: Run id.
        section: Telemetry section of the document.
        endpoint: File for the URL while metrics are served; the process that holds the run directory sets it.
    """

    run: str
    section: TelemetrySection
    endpoint: str | None = None

    @classmethod
    def for_config(cls, config: RunConfig, endpoint: Path | None = None) -> "ExportedTelemetry":
        return cls(config.run.id, config.telemetry, str(endpoint) if endpoint is not None else None)

    @classmethod
    def from_env(cls) -> "ExportedTelemetry | None":
        """Return the settings in env.TELEMETRY; None if it is not set."""
        text = os.environ.get(env.TELEMETRY)
        if not text:
            return None
        found = json.loads(text)
        return cls(found["run"], TelemetrySection.model_validate(found["telemetry"]), found["endpoint"])

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that pass these settings to a stage."""
        section = self.section.model_dump(mode="json")
        return {env.TELEMETRY: json.dumps({"run": self.run, "telemetry": section, "endpoint": self.endpoint})}


def shard(
    data: DataSection,
    workspace: str,
    *,
    workers: int = 0,
    index: int = 0,
    of: int = 1,
    verify: bool = False,
    progress: ProgressCallback | None = None,
    telemetry: ExportedTelemetry | None = None,
) -> ShardResult | None:
    """Build the shard set of a data section under <workspace>/datasets, or find it complete.

    Args:
        data: Data section of the document.
        workspace: Workspace of the run.
        workers: Packing processes; 0 for one per core.
        index: Number of this pod.
        of: Number of packing pods.
        verify: Verify the shards.
        progress: Receives the progress.
        telemetry: Telemetry settings; None for no metrics.

    Returns:
        The shard set; None if other pods have yet to complete it.

    Raises:
        InputError: The source or the target is unusable.
    """
    from podscale.data.sharding.build_shard_set import build_shard_set

    location = dataset_directory(workspace, data)
    directory = local_path(location)
    record = stage_outcomes.shard_outcome_path(workspace, data, index, of)
    before = read_outcomes(record).get("shard")
    watched = _export_build_metrics(
        telemetry, directory, record.with_name(record.name.replace(".outcome.", ".telemetry."))
    )
    with record_stage(record, "shard") as recording, stage_outcomes.disk_errors(directory), watched as watch:
        result = build_shard_set(
            data,
            directory,
            workers=workers,
            packer_index=index,
            packer_count=of,
            verify=verify,
            progress=progress,
            observer=watch,
        )
        if result.reused:
            recording.reused_outcome = (
                before if before is not None and before.is_done else StageOutcome("shard", ExitCode.DONE)
            )
    return (
        ShardResult(location, result.complete_manifest, result.reused, result.messages)
        if result.complete_manifest
        else None
    )


@contextmanager
def _export_build_metrics(
    telemetry: ExportedTelemetry | None, directory: Path, summary: Path
) -> Iterator[BuildObserver]:
    """Serve the metrics of a build, and publish the last values at its end, also after bad input."""
    if telemetry is None:
        yield NULL_OBSERVER
        return
    from podscale.telemetry.metrics import ShardMetrics
    from podscale.telemetry.pod_telemetry import StageTelemetry

    volumes = {"workspace": directory.parent, "scratch": Path(tempfile.gettempdir())}
    with StageTelemetry(telemetry.section, run=telemetry.run, stage="shard", volumes=volumes) as served:
        watch = ShardMetrics(served.registry, run=telemetry.run)
        served.start(Path(telemetry.endpoint) if telemetry.endpoint is not None else None)
        try:
            yield watch
        except InputError:
            served.finish(summary)
            raise
        served.finish(summary)


def train(config: RunConfig, shard_set: str) -> StageOutcome:
    """Train, or resume an interrupted training, and write <run>/model. Raises the error of the ranks."""
    return _run_supervised(config, "train", shard_set)


def evaluate(config: RunConfig, shard_set: str) -> StageOutcome:
    """Evaluate <run>/model on the validation split and write evaluation.json and the predictions."""
    return _run_supervised(config, "evaluate", shard_set)


def report(config: RunConfig, shard_set: str) -> StageOutcome:
    """Write the self-contained <run>/report.html, and the model card if there is a model.

    Raises:
        InputError: the run directory does not exist.
    """
    from podscale.data.loaders.build_loader import open_shard_set
    from podscale.data.node_cache import is_remote
    from podscale.report import build_report
    from podscale.report.model_card import write_model_card

    def work(run: RunDirectory, lease: Lease) -> None:
        # A report is written even if the shards are gone; only remote ones are downloaded first.
        opened = open_shard_set(shard_set, config) if is_remote(shard_set) else shard_set
        if run.model.is_dir():  # a run that failed early has a report, but no model
            write_model_card(run.path, opened)
        build_report(run.path, opened)

    directory = RunDirectory.for_config(config).path
    if not directory.is_dir():
        raise InputError("there is no run to report", field=str(directory), hint="Run `podscale train` first.")
    return _run_once(config, "report", shard_set, work)


def run_outcomes(config: RunConfig) -> dict[str, StageOutcome]:
    """Return the outcome of every stage that ran, in the order of the stages."""
    found = {**read_outcomes(RunDirectory.for_config(config).outcome), **_shard_outcome(config)}
    return {stage: found[stage] for stage in stage_outcomes.STAGES if stage in found}


def collapse_outcomes(config: RunConfig) -> dict[str, StageOutcome]:
    """Return the outcome of the collapse to each ensemble member, by `collapse <run of the member>`."""
    ended = {
        member.config.run.id: run_outcomes(member.config).get("train")
        for member in ensemble_members.ensemble_members(config)
    }
    return {f"collapse {run}": replace(one, stage=f"collapse {run}") for run, one in ended.items() if one is not None}


def _shard_outcome(config: RunConfig) -> dict[str, StageOutcome]:
    """Return the newest of the shard set's own outcome and those of failed parts."""
    workspace, data, of = config.run.workspace, config.data, config.launch.shard_pods
    whole = read_outcomes(stage_outcomes.shard_outcome_path(workspace, data))
    pods = range(of) if of > 1 else ()
    parts = [read_outcomes(stage_outcomes.shard_outcome_path(workspace, data, index, of)) for index in pods]
    failed = [part["shard"] for part in parts if "shard" in part and not part["shard"].is_done]
    known = [*whole.values(), *failed]
    return {"shard": max(known, key=lambda outcome: outcome.ended)} if known else {}


def _run_supervised(config: RunConfig, stage: Literal["train", "evaluate"], shard_set: str) -> StageOutcome:
    from podscale.launch import supervisor
    from podscale.launch.worker_spec import is_leader_pod

    def work(run: RunDirectory, lease: Lease | None) -> "StageResult":
        if stage == "evaluate":
            _check_models_exist(config)
        result = supervisor.supervise_stage(config, stage, shard_set, lease)
        if result.exit_code == ExitCode.DONE and stage == "evaluate" and result.is_leader:
            _write_evaluation(config, run, shard_set)
        return result

    def run_as_leader(run: RunDirectory, lease: Lease) -> None:
        result = work(run, lease)
        if result.exit_code != ExitCode.DONE:
            raise error_from_exit_code(
                result.exit_code, result.error or f"{stage} ended with exit code {result.exit_code}"
            )

    if is_leader_pod(os.environ):
        return _run_once(config, stage, shard_set, run_as_leader)
    return _run_follower_pod(config, stage, shard_set, work)


def _run_follower_pod(
    config: RunConfig,
    stage: Literal["train", "evaluate"],
    shard_set: str,
    work: "Callable[[RunDirectory, Lease | None], StageResult]",
) -> StageOutcome:
    """Run a stage in a pod that does not lead, or does not know yet whether it leads.

    Only the pod that turns out to lead writes to the run directory.
    """
    run = RunDirectory.for_config(config)
    found = stage_outcomes.finished_outcome(config, stage, shard_set)
    if found is not None:
        return replace(found, reused=True)
    preflight(config, preflight_target(), shard_set)
    started = time.monotonic()
    result = work(run, None)
    ended = datetime.now(UTC).isoformat()
    outcome = StageOutcome(stage, result.exit_code, result.error, time.monotonic() - started, ended)
    if result.is_leader:
        write_outcome(run.outcome, outcome)
    if not outcome.is_done:
        raise error_from_exit_code(outcome.exit_code, outcome.error)
    return outcome


def _check_models_exist(config: RunConfig) -> None:
    """Raise InputError if a model of the evaluation is missing, with the command that makes it."""
    members = {
        member.model: f"podscale collapse RUN --cycle {member.cycle}"
        for member in ensemble_members.ensemble_members(config)
    }
    for directory in ensemble_members.evaluated_model_directories(config):
        if not (directory / ensemble_members.MODEL_JSON).exists():
            command = members.get(directory, "podscale train")
            hint = f"Run `{command}` first."
            raise InputError("there is no trained model to evaluate", field=str(directory), hint=hint)


def _write_evaluation(config: RunConfig, run: RunDirectory, shard_set: str) -> None:
    """Turn the predictions of the ranks into evaluation.json."""
    from podscale.data.loaders.build_loader import open_shard_set
    from podscale.evaluation.evaluation_json import evaluate_run

    evaluate_run(run.path, config, open_shard_set(shard_set, config))


def _run_once(
    config: RunConfig,
    stage: Literal["train", "evaluate", "report"],
    shard_set: str,
    work: Callable[[RunDirectory, Lease], object],
) -> StageOutcome:
    """Run `work` unless it is finished for the same inputs; nothing is written without the lease."""
    with stage_outcomes.stage_once(config, stage, shard_set) as entered:
        if entered.found is None:
            if stage != "report":
                preflight(config, preflight_target(), shard_set)
            work(entered.run, entered.lease)
    return entered.outcome


def preflight_target() -> Literal["here", "pod"]:
    """Return `pod` in a pod of a cluster, else `here`."""
    return "pod" if "KUBERNETES_SERVICE_HOST" in os.environ else "here"
