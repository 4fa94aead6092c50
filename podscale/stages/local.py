"""Stages of a run in this process or pod, one function each; pipeline components and CLI commands call them.

Each stage writes its outcome for the exit handler (`outcome.json` of the run; beside the shard set for shards) and is
skipped if its inputs are unchanged and its result exists. The engines and the packer are imported inside the functions,
so that a launcher pod needs no framework.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from podscale.config import RunConfig
from podscale.config.data import DataSection
from podscale.config.preflight import preflight
from podscale.config.telemetry import TelemetrySection
from podscale.data.manifest import WHOLE_SHARD_SET, ShardPart, ShardSetManifest
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
from podscale.runs.launcher_heartbeat import check_not_abandoned
from podscale.runs.user_code import copy_code_to_model, user_code
from podscale.util import env
from podscale.util.locations import Location
from podscale.util.progress_reports import ProgressCallback

if TYPE_CHECKING:
    from podscale.data.shard_set import ShardSet
    from podscale.data.sharding.pack_progress import BuildObserver
    from podscale.launch.log_display import StageOutput
    from podscale.launch.worker_group import StageResult


@dataclass(frozen=True)
class ShardResult:
    """Complete shard set: location, manifest, and whether it existed before."""

    location: str
    manifest: ShardSetManifest
    reused: bool
    messages: tuple[str, ...] = ()
    """Notices for the user, one sentence each."""

    @property
    def images(self) -> dict[str, int]:
        """Images in use by split."""
        return {name: split.count for name, split in self.manifest.splits.items()}


@dataclass(frozen=True)
class ExportedTelemetry:
    """Telemetry settings of a run for a stage that does not receive the whole document.

    `endpoint` is the file for the URL while metrics are served; the process that holds the run directory sets it.
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
        values = json.loads(text)
        return cls(values["run"], TelemetrySection.model_validate(values["telemetry"]), values["endpoint"])

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that pass these settings to a stage."""
        section = self.section.model_dump(mode="json")
        return {env.TELEMETRY: json.dumps({"run": self.run, "telemetry": section, "endpoint": self.endpoint})}


def shard(  # noqa: PLR0913 (options of the stage, each with a default)
    data: DataSection,
    workspace: str,
    part: ShardPart = WHOLE_SHARD_SET,
    *,
    workers: int = 0,
    verify: bool = False,
    progress: ProgressCallback | None = None,
    telemetry: ExportedTelemetry | None = None,
    messages: TextIO | None = None,
) -> ShardResult | None:
    """Build the shard set of a data section under <workspace>/datasets, unless it is complete.

    Returns None if other pods have yet to complete it. `workers` is the number of packing processes (0: one per core).
    `messages` is the stream of notices; None: standard error.

    Raises:
        InputError: The source or the target is unusable.
    """
    from podscale.data.sharding.build_shard_set import build_shard_set

    location = dataset_directory(workspace, data)
    directory = local_path(location)
    record = stage_outcomes.shard_outcome_path(workspace, data, part)
    previous = read_outcomes(record).get("shard")
    summary = record.with_name(record.name.replace(".outcome.", ".telemetry."))
    with (
        record_stage(record, "shard") as recording,
        stage_outcomes.disk_errors(directory),
        _export_build_metrics(telemetry, directory, summary, messages) as observer,
    ):
        result = build_shard_set(
            data, directory, part, workers=workers, verify=verify, progress=progress, observer=observer
        )
        if result.reused:
            has_outcome = previous is not None and previous.is_done
            recording.reused_outcome = previous if has_outcome else StageOutcome("shard", ExitCode.DONE)
    if result.complete_manifest is None:
        return None
    return ShardResult(location, result.complete_manifest, result.reused, result.messages)


@contextmanager
def _export_build_metrics(
    telemetry: ExportedTelemetry | None, directory: Path, summary: Path, messages: TextIO | None
) -> "Iterator[BuildObserver]":
    """Serve the metrics of a build, and write the last values at its end, also after bad input."""
    if telemetry is None:
        from podscale.data.sharding.pack_progress import NULL_OBSERVER

        yield NULL_OBSERVER
        return
    from podscale.telemetry.metrics import ShardMetrics
    from podscale.telemetry.pod_telemetry import StageTelemetry

    volumes = {"workspace": directory.parent, "scratch": Path(tempfile.gettempdir())}
    with StageTelemetry(telemetry.section, run=telemetry.run, stage="shard", volumes=volumes) as served:
        observer = ShardMetrics(served.registry, run=telemetry.run)
        served.start(Path(telemetry.endpoint) if telemetry.endpoint is not None else None, messages)
        try:
            yield observer
        except InputError:
            served.finish(summary)
            raise
        served.finish(summary)


def train(config: RunConfig, shard_set: str, output: "StageOutput | None" = None) -> StageOutcome:
    """Train, or resume an interrupted training, and write <run>/model. Raises the error of the ranks."""
    return _run_supervised(config, "train", shard_set, output)


def evaluate(config: RunConfig, shard_set: str, output: "StageOutput | None" = None) -> StageOutcome:
    """Evaluate <run>/model on the validation split and write evaluation.json and the predictions."""
    return _run_supervised(config, "evaluate", shard_set, output)


def report(config: RunConfig, shard_set: str) -> StageOutcome:
    """Write <run>/report.html, and the model card if there is a model. Raises InputError if the run does not exist."""
    from podscale.data.loaders.build_loader import open_shard_set
    from podscale.report.page import build_report

    directory = RunDirectory.for_config(config).path
    if not directory.is_dir():
        raise InputError("there is no run to report", field=str(directory), hint="Run `podscale train` first.")
    with stage_outcomes.stage_once(config, "report", shard_set) as stage:
        if stage.finished is None:
            # A report is written even if the shards are gone; only remote ones are downloaded first.
            opened = open_shard_set(shard_set, config) if Location.parse(shard_set).is_remote else shard_set
            with user_code(config):
                if stage.run.model.is_dir():  # a run that failed early has a report, but no model
                    write_card(config, opened)
                build_report(stage.run.path, opened)
    return stage.outcome


def detached_report(config: RunConfig) -> str:
    """Return the report for viewers of a pipeline, which show it away from the run directory: without links to files.

    A page of the document is named as an artifact of the task `export`.
    """
    from podscale.report.demo_page_link import without_demo_link

    report = RunDirectory.for_config(config).report.read_text(encoding="utf-8")
    return without_demo_link(report, config.export.page)


def export(config: RunConfig, shard_set: str) -> StageOutcome:
    """Write the exported files of the document to <run>/export, each compared with the model."""
    from podscale.export.export_model import export_run

    with stage_outcomes.stage_once(config, "export", shard_set) as stage:
        if stage.finished is None:
            for line in export_run(config, shard_set):
                print(line, flush=True)
    return stage.outcome


def write_card(config: RunConfig, shard_set: "ShardSet | str") -> None:
    """Write the model card; it has the scores if the model was evaluated, and no data section for remote shards."""
    from podscale.report.model_card import write_model_card

    is_remote = isinstance(shard_set, str) and Location.parse(shard_set).is_remote
    write_model_card(RunDirectory.for_config(config).path, None if is_remote else shard_set)


def run_outcomes(config: RunConfig) -> dict[str, StageOutcome]:
    """Return the outcome of every stage that ran, in the order of the stages."""
    outcomes = {**read_outcomes(RunDirectory.for_config(config).outcome), **_shard_outcome(config)}
    return {stage: outcomes[stage] for stage in stage_outcomes.planned_stages(config) if stage in outcomes}


def collapse_outcomes(config: RunConfig) -> dict[str, StageOutcome]:
    """Return the outcome of the collapse to each ensemble member, by `collapse <run of the member>`."""
    outcomes = {
        f"collapse {member.config.run.id}": run_outcomes(member.config).get("train")
        for member in ensemble_members.ensemble_members(config)
    }
    return {name: replace(outcome, stage=name) for name, outcome in outcomes.items() if outcome is not None}


def _shard_outcome(config: RunConfig) -> dict[str, StageOutcome]:
    """Return the newest of the shard set's own outcome and those of failed parts."""
    workspace, data, count = config.run.workspace, config.data, config.launch.shard_pods
    parts = [ShardPart(index, count) for index in range(count)] if count > 1 else []
    shard_set, *of_parts = (
        read_outcomes(stage_outcomes.shard_outcome_path(workspace, data, part)).get("shard")
        for part in (WHOLE_SHARD_SET, *parts)
    )
    failed = [outcome for outcome in of_parts if outcome is not None and not outcome.is_done]
    outcomes = [*([shard_set] if shard_set is not None else []), *failed]
    return {"shard": max(outcomes, key=lambda outcome: outcome.ended)} if outcomes else {}


def _run_supervised(
    config: RunConfig, stage: Literal["train", "evaluate"], shard_set: str, output: "StageOutput | None"
) -> StageOutcome:
    """Run a stage under the supervisor, unless it is finished; only the leading pod writes to the run directory."""
    from podscale.launch.rendezvous import Rendezvous

    if stage_outcomes.finished_outcome(config, stage, shard_set) is None:
        check_not_abandoned(RunDirectory.for_config(config), stage)
    if not (Rendezvous.read(os.environ) or Rendezvous()).is_leader:
        return _run_follower_pod(config, stage, shard_set, output)
    with stage_outcomes.stage_once(config, stage, shard_set) as entered:
        if entered.finished is None:
            result = _supervise(config, stage, shard_set, entered.lease, output)
            if result.exit_code != ExitCode.DONE:
                reason = result.error or f"{stage} ended with exit code {result.exit_code}"
                raise error_from_exit_code(result.exit_code, reason)
    return entered.outcome


def _run_follower_pod(
    config: RunConfig, stage: Literal["train", "evaluate"], shard_set: str, output: "StageOutput | None"
) -> StageOutcome:
    """Run a stage in a pod that does not lead, or does not know yet whether it leads."""
    finished = stage_outcomes.finished_outcome(config, stage, shard_set)
    if finished is not None:
        return replace(finished, reused=True)
    started = time.monotonic()
    result = _supervise(config, stage, shard_set, None, output)
    ended = datetime.now(UTC).isoformat()
    outcome = StageOutcome(stage, result.exit_code, result.error, time.monotonic() - started, ended)
    if result.is_leader:
        write_outcome(RunDirectory.for_config(config).outcome, outcome)
    if not outcome.is_done:
        raise error_from_exit_code(outcome.exit_code, outcome.error)
    return outcome


def _supervise(
    config: RunConfig,
    stage: Literal["train", "evaluate"],
    shard_set: str,
    lease: Lease | None,
    output: "StageOutput | None" = None,
) -> "StageResult":
    """Check the stage, run its ranks, and turn the predictions of an evaluation into evaluation.json."""
    with user_code(config):
        return _supervise_with_code(config, stage, shard_set, lease, output)


def _supervise_with_code(
    config: RunConfig,
    stage: Literal["train", "evaluate"],
    shard_set: str,
    lease: Lease | None,
    output: "StageOutput | None",
) -> "StageResult":
    from podscale.export.web_runtime import runtime_problems
    from podscale.launch import supervisor

    target = preflight_target()
    training = _training_problems(config, target) if stage == "train" else ()
    preflight(config, target, shard_set, [*runtime_problems(config), *training])
    if stage == "evaluate":
        _check_models(config)
    result = supervisor.supervise_stage(config, stage, shard_set, lease, output=output)
    if result.exit_code == ExitCode.DONE and stage == "train" and result.is_leader:
        copy_code_to_model(config, RunDirectory.for_config(config).model)
    if result.exit_code == ExitCode.DONE and stage == "evaluate" and result.is_leader:
        from podscale.data.loaders.build_loader import open_shard_set
        from podscale.evaluation.evaluation_json import evaluate_run

        evaluate_run(RunDirectory.for_config(config).path, config, open_shard_set(shard_set, config))
    return result


def _training_problems(config: RunConfig, target: str) -> Iterator[InputError]:
    """Yield problems of the model and of the memory; a pod has the memory that its job requests."""
    from podscale.training.preflight import DEFAULT_CLASSES, model_problem, training_problems

    if target == "here":
        yield from training_problems(config)
    elif (problem := model_problem(config, DEFAULT_CLASSES)) is not None:
        yield problem


def _check_models(config: RunConfig) -> None:
    """Raise InputError if a model of the evaluation is missing, with the command that makes it, or has other code."""
    from podscale.runs.model_files import check_same_code

    members = {
        member.model: f"podscale collapse RUN --cycle {member.cycle}"
        for member in ensemble_members.ensemble_members(config)
    }
    for directory in ensemble_members.evaluated_model_directories(config):
        if not (directory / ensemble_members.MODEL_JSON).exists():
            hint = f"Run `{members.get(directory, 'podscale train')}` first."
            raise InputError("there is no trained model to evaluate", field=str(directory), hint=hint)
        check_same_code(directory, config)


def preflight_target() -> Literal["here", "pod"]:
    """Return `pod` in a pod of a cluster, else `here`."""
    return "pod" if "KUBERNETES_SERVICE_HOST" in os.environ else "here"
