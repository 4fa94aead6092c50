"""Supervisor of a stage in one pod: starts its ranks, forwards signals, shows progress, serves metrics, and restarts.

When a rank dies, `worker_group` finds it and kills the survivors, `stage_result` turns the exits into one exit code,
and the supervisor either launches the ranks again (single pod, `launch.max_restarts`) or returns the result, so that
the pod exits and the cluster restarts it. A restarted pod rejoins the others (see `rejoin`).
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
    """Start and exit cause of each launch of a training, in the run's goodput file.

    Training updates the file in between. Does nothing for other stages, and in a pod that does not hold the lease: if
    the rendezvous decides which pod leads, rank 0 counts its launch itself.
    """

    def __init__(self, spec: WorkerSpec, run: RunDirectory, lease: Lease | None) -> None:
        self._path, self._lease = run.goodput, lease if spec.stage == "train" else None
        # The first launch begins with this process: imports count.
        self._started_at = time.monotonic() - processes.process_age()
        self.launches: int | None = None
        """Number of launches of the training, including the current one; None if nothing is written."""

    def started(self) -> dict[str, str]:
        """Record the start of a launch and return the environment variables of its ranks."""
        if self._lease is not None:
            state = after_launch(read_goodput_state(self._path), time.time(), time.monotonic() - self._started_at)
            self.launches = state.launch
            self._write_state(state)
        return {env.LIFE_BEGAN: repr(self._started_at)}

    def ended(self, exit_code: int) -> None:
        """Record the exit cause of a launch; the time of its last heartbeat stays."""
        state = read_goodput_state(self._path)
        if state is not None and self._lease is not None:
            self._write_state(replace(state, exit_cause=EXIT_CAUSES.get(exit_code, "failed")))
        self._started_at = time.monotonic()

    def _write_state(self, state: GoodputState) -> None:
        """Write the goodput file; a full disk makes goodput less exact but does not stop the training."""
        assert self._lease is not None
        try:
            write_goodput_state(self._path, state, self._lease.check)
        except LeaseLost:
            return  # a newer launch owns the run
        except OSError as error:
            logger.warning("%s: when launches begin and how they end is not kept: %s", self._path, error.strerror)


RESTARTABLE = (int(ExitCode.PEER_LOST), int(ExitCode.HANG))

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def supervise_stage(
    config: RunConfig, stage: WorkerStage, shard_set: str, lease: Lease | None, *, worker_module: str | None = None
) -> StageResult:
    """Run one stage in this pod to its end and return its result.

    Writes environment.json in the leading pod. Call it from the main thread: it handles SIGTERM and SIGINT.

    Args:
        config: Run document.
        stage: Stage to run.
        shard_set: Location of the shards.
        lease: Lease of the run directory, held by the leading pod; None if the rendezvous decides which pod leads.
        worker_module: Module that each rank runs; None for the worker module of the engine.

    Raises:
        InputError: The stage cannot start, for example because a port is in use.
    """
    spec = build_worker_spec(
        config, stage, shard_set, os.environ, gpus=host_info.visible_gpus(), cores=host_info.cpu_count()
    )
    spec = replace(spec, worker_module=worker_module or spec.worker_module)
    return supervise_worker_spec(config, spec, RunDirectory.for_config(config).create(), lease)


def supervise_worker_spec(
    config: RunConfig, spec: WorkerSpec, run: RunDirectory, lease: Lease | None, *, out: TextIO | None = None
) -> StageResult:
    """Run a worker spec to its end; restart its ranks after a lost rank or a hang, `max_restarts` times at most."""
    with ExitStack() as stack:
        shutdown = stack.enter_context(_handle_stop_signals())
        return Supervisor(config, spec, run, lease, shutdown, stack, out or sys.stdout).run()


class Supervisor:
    """All launches of a stage in this pod, with telemetry, step log, trackers and goodput.

    Args:
        config: Run document.
        spec: Ranks of this pod.
        run: Run directory.
        lease: Lease of the run directory, None if this pod does not hold it.
        shutdown: Stop request, set by signals.
        stack: Closes everything and removes the rank directory.
        out: Output of the step log.
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
        # From here on `podscale run` shows the URL of the metrics.
        self._telemetry.start(run.endpoint if lease is not None else None)
        steplog = StepLog(out, config.telemetry.log)
        self._display = _build_display(spec, run, self._logs, self._rank_dir, steplog)
        stack.callback(self._display.close)
        failed = partial(_log_tracker_failure, run, lease)
        self._trackers = TrackerProcesses(config, spec, self._logs, self._rank_dir, self._display.print_line, failed)
        stack.callback(self._trackers.close)
        self._launch_history = LaunchHistory(spec, run, lease)

    def run(self) -> StageResult:
        """Launch the ranks, and restart them in a single pod; torchrun or the cluster restarts several pods."""
        rejoin.wait_to_rejoin(self._spec, self._is_stopping)
        if self._spec.is_leader:
            self._trackers.start()
        restarts_left = self._spec.max_restarts if self._spec.rendezvous.nodes == 1 else 0
        result = self._launch_once()
        while result.exit_code in RESTARTABLE and restarts_left and not self._shutdown.requested:
            restarts_left -= 1
            self._log_restart(result, restarts_left)
            result = self._launch_once()
        return self._finish(result)

    def _launch_once(self) -> StageResult:
        group = WorkerGroup(
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
        result = replace(stage_result(group.run()), is_leader=group.is_leader)
        self._launch_history.ended(result.exit_code)
        return result

    def _log_restart(self, result: StageResult, restarts_left: int) -> None:
        cause = "hang" if result.exit_code == ExitCode.HANG else "lost_rank"
        with EventLog(self._run.metrics, self._lease.check if self._lease else None) as events:
            events.event("restart", cause=cause, error=result.error, left=restarts_left)
        print(f"{result.error}; restarting ({restarts_left} more)", file=sys.stderr, flush=True)

    def _finish(self, result: StageResult) -> StageResult:
        """Let the trackers send their last values, and keep the final metrics of the endpoint."""
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
    """Return the display: the step log in the leading pod, the first rank's output in every pod."""
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
    """Log the event of a failed tracker; the run goes on."""
    with suppress(OSError, LeaseLost), EventLog(run.metrics, lease.check if lease else None) as events:
        events.event("tracker_failed", tracker=name, reason=reason)


@contextmanager
def _handle_stop_signals() -> Iterator[ShutdownRequest]:
    """Turn SIGTERM and SIGINT into a stop request inside the block."""
    assert threading.current_thread() is threading.main_thread(), "signals and the ranks' lives go by the main thread"
    shutdown = ShutdownRequest()
    before: dict[signal.Signals, Any] = {number: signal.signal(number, shutdown) for number in STOP_SIGNALS}
    try:
        yield shutdown
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
