"""Local pipeline runner: kfp executes the tasks in a thread, this module reports progress and forwards signals.

kfp indents a stage's output and drops its exit code. Output therefore goes to a log file, progress comes from files
that the stages write, and the result from their outcomes. Stages exit with a killed launch (see
podscale.components.stage_process).
"""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from podscale.components import stage_process
from podscale.config import RunConfig
from podscale.errors import ExitCode
from podscale.pipelines.stage_runners import USER_FILES, ProcessRunner, StageRunner
from podscale.runs import Lease, RunDirectory, StageOutcome, stage_outcomes
from podscale.runs.stage_outcomes import EXIT_INTERRUPTED
from podscale.stages.local import ExportedTelemetry, collapse_outcomes, run_outcomes
from podscale.util import env
from podscale.util.processes import DUPLICATE_SIGNAL_SECONDS, STOP_MESSAGE

POLL_SECONDS = 0.1
SHOWN_STAGES = (*stage_outcomes.STAGES, "export", "collapse")
"""Tasks that are displayed and that save when stopped. The collapse has no outcome here: members are runs."""
USER_VARIABLES = (env.IGNORE_MEMORY, env.MODEL_REGISTRY_TOKEN, *USER_FILES)
"""Variables of the user that stages get in containers too."""
LOG_TAIL_LINES = 20
"""Lines of the log shown if a stage exited without an outcome."""


@dataclass
class LocalLaunch:
    """A pipeline that runs on this machine; `on_change` callbacks read it."""

    config: RunConfig
    lease: Lease
    scratch: Path
    runner: StageRunner
    stage: str | None = None
    """Stage that is running, or ran last."""
    task: str | None = None
    """As `stage`, but the exit handler's summary counts too."""
    pid: int | None = None
    outcomes: dict[str, StageOutcome] = field(default_factory=dict)
    """Outcomes of this launch so far, by stage."""
    failed: bool = False
    """True if kfp reports a failed task."""
    failure: tuple[int, str] | None = None
    """Exit code and error that the last stage reported when it failed."""

    @property
    def stage_file(self) -> Path:
        """File with name and pid of the running stage (see components.stage_process)."""
        return self.scratch / "stage.json"

    @property
    def progress_file(self) -> Path:
        """File with the progress of the running stage (see podscale.util.progress_reports)."""
        return self.scratch / "progress.json"


@dataclass(frozen=True)
class LaunchResult:
    """Result of a launch: the stages' outcomes, and the error of the stage that failed.

    Args:
        collapses: outcomes of an ensemble's collapse tasks, by name.
    """

    outcomes: dict[str, StageOutcome]
    exit_code: int
    error: str = ""
    failed_stage: str = ""
    log: Path | None = None
    collapses: dict[str, StageOutcome] = field(default_factory=dict)

    @property
    def timed_outcomes(self) -> dict[str, StageOutcome]:
        """Outcomes of stages and collapses, in the order in which they ended."""
        return dict(sorted((self.outcomes | self.collapses).items(), key=lambda item: item[1].ended))


def run_locally(
    config: RunConfig,
    lease: Lease,
    *,
    on_change: Callable[[LocalLaunch], None],
    runner: StageRunner | None = None,
    verbose: bool = False,
) -> LaunchResult:
    """Run the whole pipeline and return its result, also if it fails.

    Args:
        lease: of the run directory; this process and the stages write there under it only.
        on_change: called about ten times a second, and once more after the end.
        runner: processes or containers for the stages; default: processes.
        verbose: show the output of kfp and of the stages.
    """
    run = RunDirectory.for_config(config)
    log = run.path / "pipeline.log"
    with tempfile.TemporaryDirectory(prefix="podscale-") as scratch:
        launch = LocalLaunch(config, lease, Path(scratch), runner or ProcessRunner())
        started_at = datetime.now(UTC)
        stage_environment = launch.runner.prepare(_stage_variables(launch), launch.scratch)
        with stage_environment, _redirect_output(sys.stdout if verbose else log):
            stopped_by = _run_and_watch(launch, run.path / "pipeline", on_change, started_at)
        _update_launch(launch, started_at)
        on_change(launch)
    ended = _launch_result(launch, stopped_by, log)
    return replace(ended, collapses=_ended_since(started_at, collapse_outcomes(config)))


def _run_and_watch(
    launch: LocalLaunch, root: Path, on_change: Callable[[LocalLaunch], None], started_at: datetime
) -> int | None:
    """Run kfp in a thread and poll the launch; return the signal that stopped it, or None."""
    thread = threading.Thread(target=_run_kfp, args=(launch, root), name="kfp", daemon=True)
    with _SignalForwarder(launch) as signals:
        thread.start()
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            _update_launch(launch, started_at)
            signals.forward()
            if signals.repeated:
                signals.kill()
                break
            on_change(launch)
    return signals.received


def _run_kfp(launch: LocalLaunch, root: Path) -> None:
    """Run the pipeline with kfp. Its exception only states that a task failed; the outcomes hold the cause."""
    from podscale.pipelines.kfp_fast_import import local
    from podscale.pipelines.training_pipeline import PipelineOptions, local_pipeline

    shutil.rmtree(root, ignore_errors=True)  # artifacts of the previous launch, which are copies from the run directory
    root.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # resources and images do not apply to local runs
        local.init(
            runner=launch.runner.kfp_runner(),
            pipeline_root=str(root),
            workspace_root=str(launch.scratch / "workspace"),  # otherwise kfp leaves one behind
            raise_on_error=True,
        )
        try:
            options = PipelineOptions(place_task=launch.runner.place_task, parallel=False)
            local_pipeline(_as_local_config(launch.config), options)()
        except Exception:
            launch.failed = True
            traceback.print_exc(file=sys.stdout)  # into the log


def _as_local_config(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"launch": config.launch.model_copy(update={"backend": "local"})})


def _update_launch(launch: LocalLaunch, started_at: datetime) -> None:
    """Read which stage is running and which have ended since the launch began."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        values = json.loads(launch.stage_file.read_text(encoding="utf-8"))
        launch.task, launch.pid = values["stage"], values["pid"]
        launch.stage = launch.task if launch.task in SHOWN_STAGES else launch.stage
    if launch.stage is not None:
        launch.failure = stage_process.failed_stage_error(launch.stage_file, launch.stage)
    launch.outcomes = _ended_since(started_at, run_outcomes(launch.config))


def _ended_since(started_at: datetime, outcomes: dict[str, StageOutcome]) -> dict[str, StageOutcome]:
    return {
        stage: outcome
        for stage, outcome in outcomes.items()
        if outcome.ended and datetime.fromisoformat(outcome.ended) >= started_at
    }


def _launch_result(launch: LocalLaunch, stopped_by: int | None, log: Path) -> LaunchResult:
    outcomes = launch.outcomes
    failed = next((outcome for outcome in outcomes.values() if not outcome.is_done), None)
    if stopped_by == signal.SIGINT:
        return LaunchResult(outcomes, EXIT_INTERRUPTED, "interrupted; the same command continues", log=log)
    if failed is not None:
        return LaunchResult(outcomes, failed.exit_code, failed.error, failed.stage, log)
    if not launch.failed and list(outcomes) == list(stage_outcomes.planned_stages(launch.config)):
        return LaunchResult(outcomes, ExitCode.DONE, log=log)
    if launch.failure is not None and launch.stage is not None:  # the stage could not record its outcome
        return LaunchResult(outcomes, *launch.failure, launch.stage, log)
    if stopped_by == signal.SIGTERM:
        return LaunchResult(outcomes, ExitCode.PREEMPTED, STOP_MESSAGE, log=log)
    stage = launch.stage or "pipeline"
    error = (
        f"the {stage} stage exited without an error. If it was killed (by a user, or because memory ran out), run the "
        f"same command to continue. End of its output:\n{_stage_log_tail(log, stage)}"
    )
    return LaunchResult(outcomes, ExitCode.FAILED, error, stage, log)


def _stage_log_tail(log: Path, stage: str) -> str:
    """Return the last lines of a stage's output from kfp's log (names in colour, stage output indented by four)."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    _, _, after = text.rpartition(f"Executing task \x1b[96m'{stage}'")
    output = re.split(r"(?m)^\d\d:\d\d:\d\d\.\d+ - (?:INFO|ERROR) - Task ", after)[0]
    lines = [line.removeprefix("    ") for line in output.splitlines() if line.strip()]
    return "\n".join(lines[-LOG_TAIL_LINES:])


def _stage_variables(launch: LocalLaunch) -> dict[str, str]:
    return {
        **launch.lease.variables,
        env.STAGE_FILE: str(launch.stage_file),
        env.PROGRESS_FILE: str(launch.progress_file),
        env.SHARD_WORKERS: str(launch.config.launch.shard_workers),
        **ExportedTelemetry.for_config(launch.config, RunDirectory.for_config(launch.config).endpoint).variables,
        **{name: os.environ[name] for name in USER_VARIABLES if name in os.environ},
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def _redirect_output(target: Path | TextIO) -> Iterator[None]:
    """Redirect the output of kfp and the stages to the log file; kfp's log handlers follow standard output."""
    if not isinstance(target, Path):
        yield
        return
    with _LossyLog(target) as file, contextlib.redirect_stdout(file):
        yield


class _LossyLog(io.TextIOBase):
    """Text file that drops output if the disk is full, instead of failing the run."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text.encode("utf-8", "replace"))
        return len(text)

    def close(self) -> None:
        self._file.close()
        super().close()


class _SignalForwarder:
    """Signal handler: the first signal asks the running stage to save and stop, the second kills it.

    Only the main thread of a process may handle signals; in another thread this does nothing.
    """

    def __init__(self, launch: LocalLaunch) -> None:
        self.received: int | None = None
        self.repeated = False
        self._since = 0.0
        self._launch = launch
        self._forwarded: set[tuple[str | None, int]] = set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_SignalForwarder":
        in_main_thread = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if in_main_thread else ():
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = number, now
            os.write(2, b"\npodscale: saving, then stopping; a second signal kills it at once\n")
        elif now - self._since > DUPLICATE_SIGNAL_SECONDS:
            self.repeated = True

    def forward(self) -> None:
        """Forward the stop request to the running stage, once per stage."""
        task, pid = self._launch.task, self._launch.pid
        if self.received is not None and pid is not None and (task, pid) not in self._forwarded:
            self._forwarded.add((task, pid))  # two stages in two containers may have the same pid
            if task in SHOWN_STAGES:
                self._launch.runner.send_signal(pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the running stage, and with it the processes it started."""
        if self._launch.pid is not None:
            self._launch.runner.send_signal(self._launch.pid, signal.SIGKILL)
