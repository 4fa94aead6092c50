"""The small parent of a stage, one per pod: starts its ranks, passes signals on, shows progress, serves metrics, and
turns how the ranks ended into one verdict: exit code and message."""

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from podscale import devices
from podscale.config import RunConfig
from podscale.errors import ExitCode
from podscale.launch import comeback, local
from podscale.launch.attempt import ShutdownRequest, WorkerGroup
from podscale.launch.environment import write_environment_file
from podscale.launch.follow import LogDisplay
from podscale.launch.lives import LaunchHistory
from podscale.launch.outcomes import StageResult, stage_result
from podscale.launch.podtask import WorkerSpec, WorkerStage, build_worker_spec
from podscale.launch.tracking import TrackerProcesses
from podscale.rundir import Lease, LeaseLost, RunDirectory, local_path
from podscale.telemetry.events import EventLog
from podscale.telemetry.stage import StageTelemetry
from podscale.telemetry.steplog import StepLog

RESTARTABLE = (int(ExitCode.PEER_LOST), int(ExitCode.HANG))

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def supervise_stage(
    config: RunConfig, stage: WorkerStage, shard_set: str, lease: Lease | None, *, rank_module: str | None = None
) -> StageResult:
    """Runs one stage in this pod to its end and tells how it ended.

    Writes environment.json (in the pod that leads). Call it from the main thread: it handles SIGTERM and SIGINT while
    it runs. lease: of the run directory, held by the pod that leads; where nobody knows yet which one that is, rank 0
    takes it. rank_module: what each rank runs; default: the entry of the document's engine. Raises InputError where
    it cannot even start (port in use).
    """
    task = build_worker_spec(
        config, stage, shard_set, os.environ, gpus=devices.visible_gpus(), cores=devices.cpu_count()
    )
    task = replace(task, rank_module=rank_module or task.rank_module)
    return supervise_worker_spec(config, task, RunDirectory.of(config).create(), lease)


def supervise_worker_spec(
    config: RunConfig, task: WorkerSpec, run: RunDirectory, lease: Lease | None, *, out: TextIO | None = None
) -> StageResult:
    """Runs `task`, starting it again after a lost rank as often as it says."""
    with ExitStack() as stack:
        stop = stack.enter_context(_handle_stop_signals())
        return Supervisor(config, task, run, lease, stop, stack, out or sys.stdout).run()


class Supervisor:
    """A task in all its lives, and what accompanies it through them: telemetry, step log, trackers, the ledger.

    stack: closes all of it, and takes the rank directory away.
    """

    def __init__(
        self,
        config: RunConfig,
        task: WorkerSpec,
        run: RunDirectory,
        lease: Lease | None,
        stop: ShutdownRequest,
        stack: ExitStack,
        out: TextIO,
    ) -> None:
        self._task, self._run, self._lease, self._stop = task, run, lease, stop
        self._rank_dir = Path(tempfile.mkdtemp(prefix="podscale-"))
        stack.callback(shutil.rmtree, self._rank_dir, ignore_errors=True)
        self._telemetry = stack.enter_context(_build_telemetry(config, task, self._rank_dir))
        self._logs = run.path / "logs"
        self._logs.mkdir(exist_ok=True)
        if task.leads is not False:
            write_environment_file(run.environment, task)
        # From here on `podscale run` shows to people where metrics are.
        self._telemetry.start(run.endpoint if lease is not None else None)
        steplog = StepLog(out, config.telemetry.log)
        self._display = _build_display(task, run, self._logs, self._rank_dir, steplog)
        stack.callback(self._display.close)
        failed = partial(_log_tracker_failure, run, lease)
        self._trackers = TrackerProcesses(config, task, self._logs, self._rank_dir, self._display.tell, failed)
        stack.callback(self._trackers.close)
        self._lives = LaunchHistory(task, run, lease)

    def run(self) -> StageResult:
        """The first life and those after it, in a pod alone: where there are several, their launcher restarts all."""
        comeback.wait_to_rejoin(self._task, self._is_stopping)
        if self._task.leads:
            self._trackers.begin()
        left = self._task.max_restarts if self._task.rendezvous.nodes == 1 else 0
        verdict = self._live()
        while verdict.exit_code in RESTARTABLE and left and not self._stop.requested:
            left -= 1
            self._tell_restart(verdict, left)
            verdict = self._live()
        return self._conclude(verdict)

    def _live(self) -> StageResult:
        attempt = WorkerGroup(
            self._task,
            self._run,
            self._rank_dir,
            self._logs,
            self._lease,
            self._stop,
            self._display,
            self._trackers,
            self._lives.begin(),
        )
        self._telemetry.launched(self._lives.launches)
        verdict = replace(stage_result(attempt.run()), leads=attempt.leads)
        self._lives.end(verdict.exit_code)
        return verdict

    def _tell_restart(self, verdict: StageResult, left: int) -> None:
        cause = "hang" if verdict.exit_code == ExitCode.HANG else "lost_rank"
        with EventLog(self._run.metrics, self._lease.check if self._lease else None) as events:
            events.event("restart", cause=cause, error=verdict.error, left=left)
        print(f"{verdict.error}; restarting ({left} more)", file=sys.stderr, flush=True)

    def _conclude(self, verdict: StageResult) -> StageResult:
        """The trackers send what they have, and what the endpoint showed last is kept."""
        if self._trackers.failure and verdict.exit_code == ExitCode.PREEMPTED:
            verdict = replace(verdict, exit_code=int(ExitCode.FAILED), error=self._trackers.failure)
        self._trackers.release(verdict)
        self._telemetry.finish(self._run.telemetry if verdict.leads else None, self._is_stopping)
        self._trackers.wait(self._is_stopping)
        self._display.update()
        return verdict

    def _is_stopping(self) -> bool:
        return self._stop.requested


def _build_display(task: WorkerSpec, run: RunDirectory, logs: Path, rank_dir: Path, steplog: StepLog) -> LogDisplay:
    """The step log in the pod that leads, and in every pod what its first rank prints."""
    node_rank = task.rendezvous.node_rank
    rank_log = logs / f"rank-{node_rank * task.processes}.log" if node_rank is not None else None
    metrics = run.metrics if task.leads is not False else None
    return LogDisplay(metrics, rank_log, local.progress_path(rank_dir, os.environ), steplog, sys.stderr)


def _build_telemetry(config: RunConfig, task: WorkerSpec, rank_dir: Path) -> StageTelemetry:
    volumes = {"workspace": local_path(config.run.workspace), "scratch": Path(tempfile.gettempdir())}
    if config.input.cache_dir is not None:
        volumes["cache"] = Path(config.input.cache_dir)
    return StageTelemetry(
        config.telemetry,
        run=task.run,
        stage=task.stage,
        engine=config.train.engine,
        volumes=volumes,
        snapshots=rank_dir,
    )


def _log_tracker_failure(run: RunDirectory, lease: Lease | None, name: str, why: str) -> None:
    """Among what happened in the run, where everybody who follows it sees it; no reason for it to end."""
    with suppress(OSError, LeaseLost), EventLog(run.metrics, lease.check if lease else None) as events:
        events.event("tracker_failed", tracker=name, reason=why)


@contextmanager
def _handle_stop_signals() -> Iterator[ShutdownRequest]:
    """Collects SIGTERM and SIGINT instead of dying by them."""
    assert threading.current_thread() is threading.main_thread(), "signals and the ranks' lives go by the main thread"
    stop = ShutdownRequest()
    before: dict[signal.Signals, Any] = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
