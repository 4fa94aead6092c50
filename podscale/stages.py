"""The stages of a run, one function each: what a component of the pipeline and a command of the CLI both call.

Each leaves its outcome where the exit handler and people find it (`outcome.json` of the run; for shards, which belong
to no single run, beside the shard set) and is not done again where its inputs are the same and its product is there.
The engines and the packer are imported inside, so that a launcher pod needs no framework.
"""

import errno
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

from podscale import ensemble, resume
from podscale.config import RunConfig
from podscale.config.model import DataSection
from podscale.config.preflight import preflight
from podscale.config.telemetry import TelemetrySection
from podscale.errors import ExitCode, InputError, error_of
from podscale.launch import comeback
from podscale.progress import Report
from podscale.rundir import (
    Lease,
    Outcome,
    RunDirectory,
    dataset_directory,
    local_path,
    read_outcomes,
    recorded_stage,
    write_outcome,
)
from podscale.shards.manifest import Manifest
from podscale.shards.watch import UNWATCHED, Watch

if TYPE_CHECKING:
    from podscale.launch.outcomes import Verdict

TELEMETRY = "PODSCALE_TELEMETRY"
"""Environment: a Telemetry as JSON, for a stage that a launcher of this machine starts."""


@dataclass(frozen=True)
class ShardResult:
    """A complete shard set: where it is, what it holds, and whether it was there before."""

    location: str
    manifest: Manifest
    reused: bool
    notes: tuple[str, ...] = ()
    """What a person should know, one sentence each."""


@dataclass(frozen=True)
class Telemetry:
    """Which run's metrics a stage exports that is not given the whole document, and how.

    endpoint: file in which the URL stands while they are served, of whoever holds the run directory.
    """

    run: str
    section: TelemetrySection
    endpoint: str | None = None

    @classmethod
    def of(cls, config: RunConfig, endpoint: Path | None = None) -> "Telemetry":
        return cls(config.run.id, config.telemetry, str(endpoint) if endpoint is not None else None)

    @classmethod
    def from_environment(cls) -> "Telemetry | None":
        """As the launcher says in TELEMETRY; None where it does not."""
        text = os.environ.get(TELEMETRY)
        if not text:
            return None
        found = json.loads(text)
        return cls(found["run"], TelemetrySection.model_validate(found["telemetry"]), found["endpoint"])

    @property
    def variables(self) -> dict[str, str]:
        """The environment that tells a stage."""
        section = self.section.model_dump(mode="json")
        return {TELEMETRY: json.dumps({"run": self.run, "telemetry": section, "endpoint": self.endpoint})}


def shard(
    data: DataSection,
    workspace: str,
    *,
    workers: int = 0,
    index: int = 0,
    of: int = 1,
    verify: bool = False,
    progress: Report | None = None,
    telemetry: Telemetry | None = None,
) -> ShardResult | None:
    """Makes the shard set of a data section under <workspace>/datasets, or finds it complete.

    workers: packing processes, 0 = one per core. index, of: this pod's part of the work; None is returned by a part
    that leaves the set incomplete. telemetry: what the document says of it; default: no metrics. Raises InputError for
    an unusable source or target.
    """
    from podscale.shards.build import build_shard_set

    location = dataset_directory(workspace, data)
    directory = local_path(location)
    record = shard_outcome_path(workspace, data, index, of)
    before = read_outcomes(record).get("shard")
    watched = _watched(telemetry, directory, record.with_name(record.name.replace(".outcome.", ".telemetry.")))
    with recorded_stage(record, "shard") as recording, _disk_errors(directory), watched as watch:
        result = build_shard_set(
            data, directory, workers=workers, index=index, of=of, verify=verify, progress=progress, watch=watch
        )
        if result.reused:
            recording.found = before if before is not None and before.done else Outcome("shard", ExitCode.DONE)
    return ShardResult(location, result.found, result.reused, result.notes) if result.found else None


@contextmanager
def _watched(telemetry: Telemetry | None, directory: Path, summary: Path) -> Iterator[Watch]:
    """Serves the metrics of a build, and makes the last ones known at its end, also where its input was bad."""
    if telemetry is None:
        yield UNWATCHED
        return
    from podscale.telemetry.sharding import ShardMetrics
    from podscale.telemetry.stage import StageTelemetry

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


def train(config: RunConfig, shard_set: str) -> Outcome:
    """Trains, or continues an interrupted training, and leaves <run>/model. Raises what the ranks raised."""
    return _supervised(config, "train", shard_set)


def evaluate(config: RunConfig, shard_set: str) -> Outcome:
    """Evaluates <run>/model on the validation split and leaves evaluation.json and the predictions."""
    return _supervised(config, "evaluate", shard_set)


def report(config: RunConfig, shard_set: str) -> Outcome:
    """Writes the self-contained <run>/report.html and the model card."""
    from podscale.evaluate.card import write_model_card
    from podscale.evaluate.report import build_report
    from podscale.input import open_shard_set
    from podscale.shards.cache import is_remote

    def work(run: RunDirectory, lease: Lease) -> None:
        # a report is due even where the shards are gone; only remote ones must be brought here first
        opened = open_shard_set(shard_set, config) if is_remote(shard_set) else shard_set
        write_model_card(run.path, opened)
        build_report(run.path, opened)

    return _once(config, "report", shard_set, work)


def shard_outcome_path(workspace: str, data: DataSection, index: int = 0, of: int = 1) -> Path:
    """Where the shard stage, or part `index` of `of`, records how it ended: beside the shard set, whose bytes depend on
    the data alone."""
    part = f".part-{index}-of-{of}" if of > 1 else ""
    return Path(f"{local_path(dataset_directory(workspace, data))}{part}.outcome.json")


def outcomes(config: RunConfig) -> dict[str, Outcome]:
    """How every stage of a run ended, in the order of the stages; stages that did not run are absent."""
    found = {**read_outcomes(RunDirectory.of(config).outcome), **_shard_outcome(config)}
    return {stage: found[stage] for stage in resume.STAGES if stage in found}


def collapse_outcomes(config: RunConfig) -> dict[str, Outcome]:
    """How the collapse to each member of an ensemble ended, by `collapse <run of the member>`; absent if not run."""
    ended = {member.config.run.id: outcomes(member.config).get("train") for member in ensemble.members(config)}
    return {f"collapse {run}": replace(one, stage=f"collapse {run}") for run, one in ended.items() if one is not None}


def _shard_outcome(config: RunConfig) -> dict[str, Outcome]:
    """How sharding ended: as the newest of the set's own outcome and those of parts that failed."""
    workspace, data, of = config.run.workspace, config.data, config.launch.shard_pods
    whole = read_outcomes(shard_outcome_path(workspace, data))
    parts = [read_outcomes(shard_outcome_path(workspace, data, index, of)) for index in range(of)] if of > 1 else []
    failed = [part["shard"] for part in parts if "shard" in part and not part["shard"].done]
    known = [*whole.values(), *failed]
    return {"shard": max(known, key=lambda outcome: outcome.ended)} if known else {}


def _supervised(config: RunConfig, stage: Literal["train", "evaluate"], shard_set: str) -> Outcome:
    from podscale.launch import supervisor
    from podscale.launch.podtask import pod_leads

    def work(run: RunDirectory, lease: Lease | None) -> "Verdict":
        if stage == "evaluate":
            _find_models(config)
        verdict = supervisor.supervise(config, stage, shard_set, lease)
        if verdict.exit_code == ExitCode.DONE and stage == "evaluate" and verdict.leads:
            _score(config, run, shard_set)
        return verdict

    def alone(run: RunDirectory, lease: Lease) -> None:
        verdict = work(run, lease)
        if verdict.exit_code != ExitCode.DONE:
            raise error_of(verdict.exit_code, verdict.error or f"{stage} ended with exit code {verdict.exit_code}")

    if pod_leads(os.environ):
        return _once(config, stage, shard_set, alone)
    return _beside(config, stage, shard_set, work)


def _beside(
    config: RunConfig,
    stage: Literal["train", "evaluate"],
    shard_set: str,
    work: "Callable[[RunDirectory, Lease | None], Verdict]",
) -> Outcome:
    """A pod that does not lead its job, or does not know it before the pods have met: only the one that turns out to
    have led writes to the run directory."""
    run = RunDirectory.of(config)
    found = resume.finished(config, stage, shard_set)
    if found is not None:
        return replace(found, reused=True)
    preflight(config, place(), shard_set)
    started = time.monotonic()
    verdict = work(run, None)
    ended = datetime.now(UTC).isoformat()
    outcome = Outcome(stage, verdict.exit_code, verdict.error, time.monotonic() - started, ended)
    if verdict.leads:
        write_outcome(run.outcome, outcome)
    if not outcome.done:
        raise error_of(outcome.exit_code, outcome.error)
    return outcome


def _find_models(config: RunConfig) -> None:
    """Raise InputError if a model of the evaluation is missing, with the command that makes it."""
    members = {member.model: f"podscale collapse RUN --cycle {member.cycle}" for member in ensemble.members(config)}
    for directory in ensemble.evaluated_models(config):
        if not (directory / ensemble.DESCRIPTION).exists():
            command = members.get(directory, "podscale train")
            hint = f"Run `{command}` first."
            raise InputError("there is no trained model to evaluate", field=str(directory), hint=hint)


def _score(config: RunConfig, run: RunDirectory, shard_set: str) -> None:
    """Turns the predictions that the ranks left into evaluation.json."""
    from podscale.evaluate.evaluation import evaluate_run
    from podscale.input import open_shard_set

    evaluate_run(run.path, config, open_shard_set(shard_set, config))


def _once(
    config: RunConfig,
    stage: Literal["train", "evaluate", "report"],
    shard_set: str,
    work: Callable[[RunDirectory, Lease], object],
) -> Outcome:
    """Carries out `work` where it is not finished for the same inputs; nothing is written without the lease."""
    run = resume.refuse_other_document(config).create()
    patience = comeback.lease_patience(config.launch.grace_seconds)
    with Lease.hold(run.lease, patience=patience) as lease, _disk_errors(run.path):
        resume.open_run(config)
        _adopt_shard_outcome(config, run)
        with recorded_stage(run.outcome, stage, lease.check) as recording, _disk_errors(run.path):  # told as recorded
            recording.found = resume.finished(config, stage, shard_set)
            if recording.found is None:
                resume.forget(config, stage)
                if stage != "report":
                    preflight(config, place(), shard_set)
                work(run, lease)
        resume.mark_finished(config, stage, shard_set)
        return read_outcomes(run.outcome)[stage]


def place() -> Literal["here", "pod"]:
    """Where this process is: in a pod of a cluster, or on a machine with everything on it."""
    return "pod" if "KUBERNETES_SERVICE_HOST" in os.environ else "here"


def _adopt_shard_outcome(config: RunConfig, run: RunDirectory) -> None:
    """Copies the shard stage's outcome into the run's, where the report and a later reader look for it."""
    outcome = read_outcomes(shard_outcome_path(config.run.workspace, config.data)).get("shard")
    if outcome is not None and read_outcomes(run.outcome).get("shard") != outcome:
        write_outcome(run.outcome, outcome)


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Raise InputError with what to do if the disk is full or cannot be written."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.ENOSPC: "Free some space or choose another run.workspace",
            errno.EDQUOT: "Free some of your quota or choose another run.workspace",
            errno.EROFS: "Choose a run.workspace that can be written",
            errno.EACCES: "Make it writable or choose another run.workspace",
        }.get(error.errno or 0)
        if advice is None:
            raise
        raise InputError(
            str(error.strerror),
            field=str(error.filename or target),
            hint=f"{advice}, then start the same command again: what is finished stays finished.",
        ) from error
