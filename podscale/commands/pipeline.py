"""Commands about a KFP backend: upload the pipeline of a run document, run it, schedule it."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from podscale.commands.documents import load_with_defaults
from podscale.config import RunConfig
from podscale.config.preflight import preflight
from podscale.errors import ExitCode, InputError
from podscale.pipelines.kfp_endpoint import KfpEndpoint
from podscale.runs.stage_outcomes import STAGES
from podscale.util.formatting import format_duration
from podscale.util.terminal import paint

if TYPE_CHECKING:
    from podscale.pipelines.kfp_backend import KfpBackend, PipelineProgress, PipelineVersion, StartedRun


SCHEDULED_TIME = "[[ScheduledTime]]"
"""KFP's macro: the planned time of a scheduled run as 14 digits."""
ID_CHARACTERS = 40
TIME_CHARACTERS = 15
"""Of a scheduled run's name: a hyphen and the time."""
STATE_STYLES = {"SUCCEEDED": "green", "FAILED": "bold red", "CANCELED": "yellow", "CACHED": "green", "SKIPPED": "dim"}
SHOWN_TASKS = ("pack", *STAGES, "collapse", "summary")
HIDDEN_TASK_STATES = ("PENDING", "RUNTIME_STATE_UNSPECIFIED")


@dataclass(frozen=True)
class PipelineRequest:
    """What is sent: the document and its changes, and under which names."""

    document: str | None
    changes: Sequence[str]
    pipeline: str
    defaults: str | None = None
    """What holds where the document says nothing: as for documents.resolved."""
    experiment: str = ""
    name: str | None = None
    service_account: str | None = None
    cache: bool = True
    kfp: str = "2.16"
    """Oldest version of KFP that must accept the package."""


def upload_pipeline(request: PipelineRequest, endpoint: KfpEndpoint, *, as_json: bool) -> None:
    """Makes the document's package the newest version of the pipeline."""
    config = _load_document(request)
    _, version = _upload_package(request, config, endpoint)
    _print(asdict(version), _upload_message(version), as_json)


def run_remote_pipeline(request: PipelineRequest, endpoint: KfpEndpoint, *, wait: bool, as_json: bool) -> int:
    """Uploads, starts a run and, if asked, follows it; returns the exit code."""
    config = _load_document(request)
    backend, version = _upload_package(request, config, endpoint)
    started = backend.run(
        version, request.name or config.run.id, request.experiment, {"run_id": config.run.id}, request.service_account
    )
    _print(asdict(started), f"run {started.name}: {started.link}", as_json)
    return _follow_run(backend, started) if wait else int(ExitCode.DONE)


def schedule_pipeline(
    request: PipelineRequest, endpoint: KfpEndpoint, *, cron: str, replace: bool, as_json: bool
) -> None:
    """Has the backend start a run at every time of `cron`; each gets a run.id of its own."""
    config = _load_document(request)
    longest = ID_CHARACTERS - TIME_CHARACTERS
    if len(config.run.id) > longest:
        raise InputError(
            f"longer than {longest} characters, and scheduled runs are named <run.id>-<time>",
            field="run.id",
            got=config.run.id,
            hint="Choose a shorter one with --set run.id=...",
        )
    fields = _kfp_cron(cron)
    backend, version = _upload_package(request, config, endpoint)
    parameters = {"run_id": f"{config.run.id}-{SCHEDULED_TIME}"}
    name = request.name or config.run.id
    started = backend.schedule(
        version, name, request.experiment, fields, parameters, request.service_account, replace=replace
    )
    _print(asdict(started), f"schedule {name} ({fields}): {started.link}", as_json)


def _load_document(request: PipelineRequest) -> RunConfig:
    config = load_with_defaults(request.document, request.changes, request.defaults)
    preflight(config, "cluster")
    return config


def _upload_package(
    request: PipelineRequest, config: RunConfig, endpoint: KfpEndpoint
) -> "tuple[KfpBackend, PipelineVersion]":
    from podscale.pipelines.kfp_backend import connect_backend
    from podscale.pipelines.package import package_pipeline

    backend = connect_backend(endpoint)  # before compiling: what is wrong with the address is known at once
    text = package_pipeline(config, cache=request.cache, kfp=request.kfp)
    version = backend.upload(text, request.pipeline, config.run.id, f"Podscale run {config.run.id}")
    print(_upload_message(version), file=sys.stderr)
    return backend, version


def _upload_message(version: "PipelineVersion") -> str:
    how = "uploaded" if version.new else "is there already"
    return f"version {version.name} {how}: {version.link}"


def _print(content: dict[str, object], text: str, as_json: bool) -> None:
    print(json.dumps(content, indent=2) if as_json else text, flush=True)


def _follow_run(backend: "KfpBackend", started: "StartedRun") -> int:
    """Shows the stages as they come and go; returns 0 only for a run that succeeded."""
    view = _StagePrinter()
    try:
        state = backend.follow(started.id, view.update)
    except KeyboardInterrupt:
        print(f"\nno longer watching; the run goes on: {started.link}", file=sys.stderr)
        raise
    if state == "SUCCEEDED":
        return int(ExitCode.DONE)
    print(
        f"podscale: run {started.name} ended {state}; its summary task says how each stage ended: {started.link}",
        file=sys.stderr,
    )
    return int(ExitCode.FAILED)


class _StagePrinter:
    """Prints each change of a stage's state, with the time since the run was first seen."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._seen: dict[str, str] = {}

    def update(self, progress: "PipelineProgress") -> None:
        states = {
            name: state
            for name, state in progress.tasks.items()
            if name in SHOWN_TASKS and state not in HIDDEN_TASK_STATES
        }
        for name, state in [*states.items(), ("run", progress.state)]:
            if self._seen.get(name) != state:
                self._seen[name] = state
                shown = paint(f"{state.lower():<10}", STATE_STYLES.get(state, ""), sys.stderr)
                print(
                    f"{format_duration(time.monotonic() - self._begun):>8}  {name:<9} {shown}".rstrip(), file=sys.stderr
                )


def _kfp_cron(cron: str) -> str:
    """KFP's form of a cron expression, seconds first; the usual five fields are taken too."""
    fields = cron.split()
    if cron.startswith("@") and len(fields) in (1, 2):
        return cron
    if len(fields) not in (5, 6):
        raise InputError(
            "not five fields (minute hour day month weekday) or six (with seconds before them), such as '0 2 * * *' "
            "for every night at two (UTC)",
            field="--cron",
            got=cron,
        )
    return " ".join(["0", *fields] if len(fields) == 5 else fields)
