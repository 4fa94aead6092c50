"""The small parent of a stage, one per pod: starts its ranks, passes signals on, shows progress, serves metrics, and
turns how the ranks ended into one verdict: exit code and message.

The lives of a training as the pod that leads sees them: when each began, and how it ended.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from podscale.config import RunConfig
from podscale.errors import ExitCode
from podscale.launch import rejoin, worker_spec
from podscale.launch.environment_file import write_environment_file
from podscale.launch.log_display import LogDisplay
from podscale.launch.stage_result import StageResult, stage_result
from podscale.launch.tracker_processes import TrackerProcesses
from podscale.launch.worker_group import ShutdownRequest, WorkerGroup
from podscale.launch.worker_spec import WorkerSpec, WorkerStage, build_worker_spec
from podscale.runs import Lease, LeaseLost, RunDirectory, local_path
from podscale.telemetry.events import EventLog
from podscale.telemetry.goodput import GoodputState, after_launch, read_goodput_state, write_goodput_state
from podscale.telemetry.pod_telemetry import StageTelemetry
from podscale.telemetry.step_log import StepLog
from podscale.util import env, host_info, processes

logger = logging.getLogger(__name__)

EXIT_CAUSES: Mapping[int, str] = {
    ExitCode.DONE: "done",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.HANG: "hang",
    ExitCode.PEER_LOST: "lost_rank",
}


class LaunchHistory:
    """Writes both into the run's heartbeat, which the training keeps in between.

    Does nothing for other stages, and in a pod that does not hold the lease: where the pods learn only in meeting which
    of them leads, rank 0 counts its life by itself.
    """

    def __init__(self, spec: WorkerSpec, run: RunDirectory, lease: Lease | None) -> None:
        self._path, self._lease = run.goodput, lease if spec.stage == "train" else None
        self._started_at = (
            time.monotonic() - processes.process_age()
        )  # the first life begins with this process: imports count
        self.launches: int | None = None
        """Of the training, over all lives, with the one that has begun; None where nothing is written."""

    def started(self) -> dict[str, str]:
        """A life begins; what its ranks are to find in their environment."""
        if self._lease is not None:
            book = after_launch(read_goodput_state(self._path), time.time(), time.monotonic() - self._started_at)
            self.launches = book.life
            self._write_state(book)
        return {env.LIFE_BEGAN: repr(self._started_at)}

    def ended(self, exit_code: int) -> None:
        """The life has ended with the stage's exit code. The time of the last heartbeat stays as it is."""
        book = read_goodput_state(self._path)
        if book is not None and self._lease is not None:
            self._write_state(replace(book, ended=EXIT_CAUSES.get(exit_code, "failed")))
        self._started_at = time.monotonic()

    def _write_state(self, state: GoodputState) -> None:
        """A full disk costs the ledger accuracy, never the training."""
        assert self._lease is not None
        try:
            write_goodput_state(self._path, state, self._lease.check)
        except LeaseLost:
            return  # its life is of no interest any more
        except OSError as error:
            logger.warning("%s: when launches begin and how they end is not kept: %s", self._path, error.strerror)


RESTARTABLE = (int(ExitCode.PEER_LOST), int(ExitCode.HANG))

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def supervise_stage(
    config: RunConfig, stage: WorkerStage, shard_set: str, lease: Lease | None, *, worker_module: str | None = None
) -> StageResult:
    """Runs one stage in this pod to its end and tells how it ended.

    Writes environment.json (in the pod that leads). Call it from the main thread: it handles SIGTERM and SIGINT while
    it runs. lease: of the run directory, held by the pod that leads; where nobody knows yet which one that is, rank 0
    takes it. worker_module: what each rank runs; default: the entry of the document's engine. Raises InputError where
    it cannot even start (port in use).
    """
    task = build_worker_spec(
        config, stage, shard_set, os.environ, gpus=host_info.visible_gpus(), cores=host_info.cpu_count()
    )
    task = replace(task, worker_module=worker_module or task.worker_module)
    return supervise_worker_spec(config, task, RunDirectory.for_config(config).create(), lease)


def supervise_worker_spec(
    config: RunConfig, spec: WorkerSpec, run: RunDirectory, lease: Lease | None, *, out: TextIO | None = None
) -> StageResult:
    """Runs `task`, starting it again after a lost rank as often as it says."""
    with ExitStack() as stack:
        stop = stack.enter_context(_handle_stop_signals())
        return Supervisor(config, spec, run, lease, stop, stack, out or sys.stdout).run()


class Supervisor:
    """A task in all its lives, and what accompanies it through them: telemetry, step log, trackers, the ledger.

    stack: closes all of it, and takes the rank directory away.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: WorkerSpec,
        run: RunDirectory,
        lease: Lease | None,
        shutdown: ShutdownRequest,
        stack: ExitStack,
        out: TextIO,
    ) -> None:
        self._spec, self._run, self._lease, self._shutdown = spec, run, lease, shutdown
        self._rank_dir = Path(tempfile.mkdtemp(prefix="podscale-"))
        stack.callback(shutil.rmtree, self._rank_dir, ignore_errors=True)
        self._telemetry = stack.enter_context(_build_telemetry(config, spec, self._rank_dir))
        self._logs = run.path / "logs"
        self._logs.mkdir(exist_ok=True)
        if spec.is_leader is not False:
            write_environment_file(run.environment, spec)
        # From here on `podscale run` shows to people where metrics are.
        self._telemetry.start(run.endpoint if lease is not None else None)
        steplog = StepLog(out, config.telemetry.log)
        self._display = _build_display(spec, run, self._logs, self._rank_dir, steplog)
        stack.callback(self._display.close)
        failed = partial(_log_tracker_failure, run, lease)
        self._trackers = TrackerProcesses(config, spec, self._logs, self._rank_dir, self._display.print_line, failed)
        stack.callback(self._trackers.close)
        self._launch_history = LaunchHistory(spec, run, lease)

    def run(self) -> StageResult:
        """The first life and those after it, in a pod alone: where there are several, their launcher restarts all."""
        rejoin.wait_to_rejoin(self._spec, self._is_stopping)
        if self._spec.is_leader:
            self._trackers.start()
        left = self._spec.max_restarts if self._spec.rendezvous.nodes == 1 else 0
        verdict = self._launch_once()
        while verdict.exit_code in RESTARTABLE and left and not self._shutdown.requested:
            left -= 1
            self._log_restart(verdict, left)
            verdict = self._launch_once()
        return self._finish(verdict)

    def _launch_once(self) -> StageResult:
        attempt = WorkerGroup(
            self._spec,
            self._run,
            self._rank_dir,
            self._logs,
            self._lease,
            self._shutdown,
            self._display,
            self._trackers,
            self._launch_history.started(),
        )
        self._telemetry.set_launches(self._launch_history.launches)
        verdict = replace(stage_result(attempt.run()), is_leader=attempt.is_leader)
        self._launch_history.ended(verdict.exit_code)
        return verdict

    def _log_restart(self, result: StageResult, restarts_left: int) -> None:
        cause = "hang" if result.exit_code == ExitCode.HANG else "lost_rank"
        with EventLog(self._run.metrics, self._lease.check if self._lease else None) as events:
            events.event("restart", cause=cause, error=result.error, left=restarts_left)
        print(f"{result.error}; restarting ({restarts_left} more)", file=sys.stderr, flush=True)

    def _finish(self, result: StageResult) -> StageResult:
        """The trackers send what they have, and what the endpoint showed last is kept."""
        if self._trackers.failure and result.exit_code == ExitCode.PREEMPTED:
            result = replace(result, exit_code=int(ExitCode.FAILED), error=self._trackers.failure)
        self._trackers.stop(result)
        self._telemetry.finish(self._run.telemetry if result.is_leader else None, self._is_stopping)
        self._trackers.wait(self._is_stopping)
        self._display.update()
        return result

    def _is_stopping(self) -> bool:
        return self._shutdown.requested


def _build_display(spec: WorkerSpec, run: RunDirectory, logs: Path, rank_dir: Path, steplog: StepLog) -> LogDisplay:
    """The step log in the pod that leads, and in every pod what its first rank prints."""
    node_rank = spec.rendezvous.node_rank
    rank_log = logs / f"rank-{node_rank * spec.processes_per_node}.log" if node_rank is not None else None
    metrics = run.metrics if spec.is_leader is not False else None
    return LogDisplay(metrics, rank_log, worker_spec.progress_path(rank_dir, os.environ), steplog, sys.stderr)


def _build_telemetry(config: RunConfig, spec: WorkerSpec, rank_dir: Path) -> StageTelemetry:
    volumes = {"workspace": local_path(config.run.workspace), "scratch": Path(tempfile.gettempdir())}
    if config.input.cache_dir is not None:
        volumes["cache"] = Path(config.input.cache_dir)
    return StageTelemetry(
        config.telemetry,
        run=spec.run,
        stage=spec.stage,
        engine=config.train.engine,
        volumes=volumes,
        snapshots=rank_dir,
    )


def _log_tracker_failure(run: RunDirectory, lease: Lease | None, name: str, reason: str) -> None:
    """Among what happened in the run, where everybody who follows it sees it; no reason for it to end."""
    with suppress(OSError, LeaseLost), EventLog(run.metrics, lease.check if lease else None) as events:
        events.event("tracker_failed", tracker=name, reason=reason)


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
