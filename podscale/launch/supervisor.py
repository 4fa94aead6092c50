"""Supervisor of a stage in one pod: starts its ranks, forwards signals, shows progress, serves metrics, and restarts.

When a rank fails, `worker_group` kills the survivors and turns the exits into one exit code. The supervisor then
launches the ranks again (single pod, `launch.max_restarts`) or returns the result, so that the pod exits and the
cluster restarts it (see `rejoin`). In the job of a pipeline, it stops the ranks if the launcher of the pipeline is gone
(see podscale.runs.launcher_heartbeat).
"""

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from podscale.config import RunConfig
from podscale.distributed.startup_clock import StartupClock, process_start
from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import ExitCode
from podscale.launch import rejoin
from podscale.launch.environment_file import describe_environment
from podscale.launch.log_display import LogDisplay, StageOutput
from podscale.launch.tracker_processes import TrackerProcesses
from podscale.launch.worker_group import ShutdownRequest, StageResult, WorkerGroup
from podscale.launch.worker_spec import WorkerSpec, WorkerStage, build_worker_spec, progress_path
from podscale.runs import Lease, LeaseLost, RunDirectory, local_path
from podscale.runs.launcher_heartbeat import LauncherMonitor, abandoned_message
from podscale.runs.lease import lease_wait_seconds
from podscale.telemetry.events import EventLog
from podscale.telemetry.goodput import GoodputState, after_launch, read_goodput_state, write_goodput_state
from podscale.telemetry.pod_telemetry import StageTelemetry
from podscale.util import env, host_info
from podscale.util.files import write_json

logger = logging.getLogger(__name__)

RESTARTABLE = (ExitCode.PEER_LOST, ExitCode.HANG)
"""Exit codes after which the supervisor of a single pod launches the ranks again."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

EXIT_CAUSES: Mapping[int, str] = {
    ExitCode.DONE: "done",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.HANG: "hang",
    ExitCode.PEER_LOST: "lost_rank",
}
"""Exit cause in the goodput file, by exit code; all other codes are `failed`."""


def supervise_stage(
    config: RunConfig,
    stage: WorkerStage,
    shard_set: str,
    lease: Lease | None,
    *,
    output: StageOutput | None = None,
    worker_module: str = "",
) -> StageResult:
    """Run one stage in this pod. In the main thread it handles SIGTERM and SIGINT; elsewhere nothing stops the stage.

    Args:
        lease: Lease of the run directory, held by the leading pod; None if the rendezvous decides which pod leads.
        output: Output while the stage runs; None: that of the commands.
        worker_module: Module that each rank runs; "" for the worker module of the engine.

    Raises:
        InputError: The stage cannot start, for example because a port is in use.
    """
    spec = build_worker_spec(
        config, stage, shard_set, os.environ, gpus=host_info.visible_gpus(), cores=host_info.cpu_count()
    )
    with ExitStack() as stack:
        shutdown = stack.enter_context(_handle_stop_signals())
        spec = replace(spec, worker_module=worker_module)
        return Supervisor(spec, lease, shutdown, stack, output or StageOutput.printed(config.telemetry)).run()


class Supervisor:
    """All launches of a stage in this pod, with telemetry, step log, trackers and goodput.

    `stack` closes everything and removes the rank directory, in which the ranks leave their reports and metrics.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        lease: Lease | None,
        shutdown: ShutdownRequest,
        stack: ExitStack,
        output: StageOutput,
    ) -> None:
        self._spec, self._lease, self._shutdown = spec, lease, shutdown
        self._run = run = RunDirectory.for_config(spec.config).create()
        self._rank_dir = Path(tempfile.mkdtemp(prefix="podscale-"))
        stack.callback(shutil.rmtree, self._rank_dir, ignore_errors=True)
        self._telemetry = stack.enter_context(_build_telemetry(spec, self._rank_dir))
        self._logs = run.path / "logs"
        self._logs.mkdir(exist_ok=True)
        if spec.rendezvous.is_leader is not False:
            write_json(run.environment, describe_environment(spec))
        # From here on `podscale run` shows the URL of the metrics.
        self._telemetry.start(run.endpoint if lease is not None else None, output.messages)
        self._display = _build_display(spec, run, self._logs, self._rank_dir, output)
        stack.callback(self._display.close)
        self._trackers = TrackerProcesses(
            spec, self._logs, self._rank_dir, self._display.print_line, self._log_tracker_failure
        )
        stack.callback(self._trackers.close)
        self._launch_history = LaunchHistory(spec, run, lease)
        self._launcher_monitor = _build_launcher_monitor(spec, run, lease)

    def run(self) -> StageResult:
        """Launch the ranks; in a single pod, again after a `RESTARTABLE` exit (see the module for several pods)."""
        rejoin.wait_to_rejoin(self._spec, self._is_stopping)
        restarts_left = self._spec.config.launch.max_restarts if self._spec.rendezvous.nodes == 1 else 0
        result = self._launch_once()
        while result.exit_code in RESTARTABLE and restarts_left and not self._shutdown.requested:
            restarts_left -= 1
            self._log_restart(result, restarts_left)
            result = self._launch_once()
        return self._finish(result)

    def _launch_once(self) -> StageResult:
        spec, startup = self._spec, StartupClock(self._launch_history.started())
        worker_env = WorkerEnv(
            spec.config,
            spec.stage,
            spec.shard_set,
            self._rank_dir,
            log_directory=self._logs,
            lease=self._run.lease,
            fence_number=self._lease.number if self._lease else None,
            lease_wait_seconds=None if self._lease else lease_wait_seconds(spec.config.launch.grace_seconds),
            startup=startup,
        )
        self._telemetry.set_launches(self._launch_history.launches)
        group = WorkerGroup(spec, worker_env, self._shutdown, self._poll)
        startup.end_part("supervisor")
        result = group.run()
        self._launch_history.ended(result.exit_code)
        return result

    def _poll(self, is_leader: bool) -> None:
        """Show new lines and start the trackers; request a stop if a required one failed or the launcher is gone."""
        if is_leader:
            self._trackers.start()
        self._check_launcher(is_leader)
        self._trackers.poll()
        if self._trackers.failure and not self._shutdown.requested:
            self._shutdown.request()
        self._display.update()

    def _check_launcher(self, is_leader: bool) -> None:
        """Request a stop if the launcher of the pipeline that the job belongs to has been silent too long."""
        monitor = self._launcher_monitor
        if monitor is None or self._shutdown.requested:
            return
        with suppress(LeaseLost):  # a newer launch of the run watches
            if monitor.poll(is_leader=is_leader):
                self._shutdown.request()
                if not is_leader:
                    return
                with suppress(OSError), self._event_log() as events:
                    events.event("launcher_lost", grace_seconds=monitor.grace_seconds)

    def _log_restart(self, result: StageResult, restarts_left: int) -> None:
        with self._event_log() as events:
            events.event("restart", cause=EXIT_CAUSES[result.exit_code], error=result.error, left=restarts_left)
        self._display.print_line(f"{result.error}; restarting ({restarts_left} left)")

    def _log_tracker_failure(self, name: str, reason: str) -> None:
        """Log the event of a failed tracker."""
        with suppress(OSError, LeaseLost), self._event_log() as events:
            events.event("tracker_failed", tracker=name, reason=reason)

    def _event_log(self) -> EventLog:
        return EventLog(self._run.metrics, self._lease.check if self._lease else None)

    def _finish(self, result: StageResult) -> StageResult:
        """Let the trackers send their last values, and write the final metrics of the endpoint to the run directory.

        A stop that a required tracker caused becomes the failure of that tracker. The error of an abandoned job names
        the cause of the stop.
        """
        monitor = self._launcher_monitor
        if monitor is not None and monitor.is_lost and result.exit_code == ExitCode.PREEMPTED:
            result = replace(result, error=f"{abandoned_message(monitor.grace_seconds)}; {result.error}")
        if self._trackers.failure and result.exit_code == ExitCode.PREEMPTED:
            result = replace(result, exit_code=int(ExitCode.FAILED), error=self._trackers.failure)
        self._trackers.stop(result)
        self._telemetry.finish(self._run.telemetry if result.is_leader else None, self._is_stopping)
        self._trackers.wait(self._is_stopping)
        self._display.update()
        return result

    def _is_stopping(self) -> bool:
        return self._shutdown.requested


class LaunchHistory:
    """Start and exit cause of each launch of a training, in the run's goodput file.

    While a launch runs, rank 0 updates the file. This class writes nothing for other stages, or in a pod that does not
    hold the lease. If the rendezvous decides which pod leads, rank 0 records its launch itself.
    """

    def __init__(self, spec: WorkerSpec, run: RunDirectory, lease: Lease | None) -> None:
        self._path, self._lease = run.goodput, lease if spec.stage == "train" else None
        # The first launch begins when this process starts, so that imports count.
        self._started_at = process_start()
        self.launches: int | None = None
        """Number of launches of the training, including the current one; None if nothing is written."""

    def started(self) -> float:
        """Record the start of a launch and return it on the monotonic clock, seconds."""
        if self._lease is not None:
            state = after_launch(read_goodput_state(self._path), time.time(), time.monotonic() - self._started_at)
            self.launches = state.launch
            self._write_state(state)
        return self._started_at

    def ended(self, exit_code: int) -> None:
        """Record the exit cause of a launch. The file keeps the time of the launch's last heartbeat."""
        state = read_goodput_state(self._path)
        if state is not None and self._lease is not None:
            self._write_state(replace(state, exit_cause=EXIT_CAUSES.get(exit_code, "failed")))
        self._started_at = time.monotonic()  # the next launch begins here, if there is one

    def _write_state(self, state: GoodputState) -> None:
        """Write the goodput file. A full disk makes goodput less exact but does not stop the training."""
        assert self._lease is not None
        try:
            write_goodput_state(self._path, state, self._lease.check)
        except LeaseLost:
            return  # a newer launch owns the run
        except OSError as error:
            logger.warning("%s: cannot record the launches of the run: %s", self._path, error.strerror)


def _build_display(spec: WorkerSpec, run: RunDirectory, logs: Path, rank_dir: Path, output: StageOutput) -> LogDisplay:
    """Return the display: the records if this pod may lead, the output of this pod's first rank in every pod."""
    node_rank = spec.rendezvous.node_rank
    rank_log = logs / f"rank-{node_rank * spec.processes_per_node}.log" if node_rank is not None else None
    metrics = run.metrics if spec.rendezvous.is_leader is not False else None
    return LogDisplay(metrics, rank_log, progress_path(rank_dir, os.environ), output)


def _build_launcher_monitor(spec: WorkerSpec, run: RunDirectory, lease: Lease | None) -> LauncherMonitor | None:
    """Return the watch of the launcher's heartbeat; None for a job without a launcher that renews it."""
    grace_seconds = env.read_seconds(env.LAUNCHER_GRACE)
    if not grace_seconds:
        return None
    fence = lease.check if lease is not None else lambda: None
    return LauncherMonitor(run, spec.stage, grace_seconds, fence=fence)


def _build_telemetry(spec: WorkerSpec, rank_dir: Path) -> StageTelemetry:
    config = spec.config
    volumes = {"workspace": local_path(config.run.workspace), "scratch": Path(tempfile.gettempdir())}
    if config.input.cache_dir is not None:
        volumes["cache"] = Path(config.input.cache_dir)
    return StageTelemetry(
        config.telemetry,
        run=config.run.id,
        stage=spec.stage,
        engine=config.train.engine,
        volumes=volumes,
        snapshots=rank_dir,
    )


@contextmanager
def _handle_stop_signals() -> Iterator[ShutdownRequest]:
    """Turn SIGTERM and SIGINT into a stop request inside the block; only the main thread may handle signals."""
    shutdown = ShutdownRequest()
    if threading.current_thread() is not threading.main_thread():
        yield shutdown
        return
    previous_handlers: dict[signal.Signals, Any] = {number: signal.signal(number, shutdown) for number in STOP_SIGNALS}
    try:
        yield shutdown
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
