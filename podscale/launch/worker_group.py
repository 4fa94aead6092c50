"""One launch of a pod's ranks: start, watch, stop, and collect their exits."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from podscale.distributed.worker_exit import read_exit_status, read_worker_reports, registered_workers
from podscale.errors import ExitCode
from podscale.launch import process_cleanup, rendezvous, worker_spec
from podscale.launch.log_display import LogDisplay
from podscale.launch.stage_result import GroupExit, LostWorker
from podscale.launch.tracker_processes import TrackerProcesses
from podscale.launch.worker_spec import WorkerSpec
from podscale.runs import Lease, RunDirectory
from podscale.util import env, host_info, processes
from podscale.util.processes import DUPLICATE_SIGNAL_SECONDS

POLL_SECONDS = 0.1
SURVIVOR_GRACE_SECONDS = 15.0
"""Time after a failure until the surviving ranks are killed, seconds: they may report the error they see."""


class ShutdownRequest:
    """Stop request: the first asks the ranks to save and exit, a second kills them.

    Under `podscale run` the first signal may arrive twice, from that command and from the process group. A second
    request then kills this process from there.
    """

    def __init__(self) -> None:
        self.requested = False
        self.repeated = False
        self.requested_at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.request()
        elif time.monotonic() - self.requested_at > DUPLICATE_SIGNAL_SECONDS and env.LAUNCHER_PID not in os.environ:
            self.repeated = True

    def request(self) -> None:
        """Request a stop."""
        self.requested, self.requested_at = True, time.monotonic()


class WorkerGroup:
    """One launch of this pod's ranks."""

    def __init__(
        self,
        spec: WorkerSpec,
        run: RunDirectory,
        rank_dir: Path,
        logs: Path,
        lease: Lease | None,
        shutdown: ShutdownRequest,
        display: LogDisplay,
        trackers: TrackerProcesses,
        variables: Mapping[str, str],
    ) -> None:
        self._spec = spec
        self._rank_dir = rank_dir
        self._shutdown = shutdown
        self._launcher_log = logs / f"launcher-{spec.rendezvous.node_rank or 0}.log"
        self._launcher_log_offset = self._launcher_log.stat().st_size if self._launcher_log.exists() else 0
        self._display = display
        self._trackers = trackers
        self._variables = worker_spec.launch_environment(
            spec, rank_dir, logs, os.environ, lease=run.lease, fence=lease.number if lease else None
        )
        self._variables |= variables
        self._lost_worker: LostWorker | None = None
        self._oom_kills_before = host_info.oom_kill_count()
        self._forwarded = 0
        self._killed = False
        self._failed_since: float | None = None
        self._killed_survivors = False

    def run(self) -> GroupExit:
        """Start the launcher, wait until it exits, and kill every remaining process of the launch."""
        shutil.rmtree(self._rank_dir)  # files of the previous launch
        self._rank_dir.mkdir(mode=0o700)
        child = worker_spec.start_launcher(
            worker_spec.launch_command(self._spec, self._rank_dir), self._variables, self._launcher_log
        )
        try:
            with rendezvous.log_rendezvous_progress(
                self._spec.rendezvous, lambda: bool(registered_workers(self._rank_dir))
            ):
                while child.poll() is None:
                    self._display.update()
                    self._poll_trackers()
                    self._find_lost_worker()
                    self._forward_stop(child)
                    self._kill_survivors()
                    time.sleep(POLL_SECONDS)
        finally:
            process_cleanup.kill_launch_processes(self._rank_dir)
            child.wait()
        self._poll_trackers()
        self._find_lost_worker()
        self._display.update()
        return self._group_exit(child.returncode)

    @property
    def is_leader(self) -> bool:
        """True if rank 0 runs in this pod, or would have run here."""
        known = self._spec.is_leader
        return 0 in registered_workers(self._rank_dir) if known is None else known

    def _poll_trackers(self) -> None:
        """Poll the trackers; start them here if the rendezvous made this pod the leader."""
        if self._spec.is_leader is None and self.is_leader:
            self._trackers.start()
        self._trackers.poll()
        if self._trackers.failure and not self._shutdown.requested:
            self._shutdown.request()

    def _forward_stop(self, child: "subprocess.Popen[bytes]") -> None:
        shutdown = self._shutdown
        if shutdown.requested and not self._forwarded:
            self._forwarded = 1
            child.send_signal(signal.SIGTERM)
        kill_due = time.monotonic() - shutdown.requested_at > self._spec.grace_seconds or shutdown.repeated
        if shutdown.requested and kill_due and not self._killed:
            self._killed = self._workers_without_report() != [] or not registered_workers(self._rank_dir)
            process_cleanup.kill_launch_processes(self._rank_dir)

    def _kill_survivors(self) -> None:
        if self._spec.uses_torchrun and self._spec.max_restarts:
            return  # torchrun restarts the ranks itself
        if self._failed_since is None and (self._lost_worker is not None or self._has_failed()):
            self._failed_since = time.monotonic()
        since = self._failed_since
        if since is not None and time.monotonic() - since > SURVIVOR_GRACE_SECONDS and not self._killed_survivors:
            self._killed_survivors = True
            process_cleanup.kill_launch_processes(self._rank_dir)

    def _has_failed(self) -> bool:
        """Return True if a rank has reported a failure."""
        no_failure = (ExitCode.DONE, ExitCode.PREEMPTED)
        return any(report.exit_code not in no_failure for report in read_worker_reports(self._rank_dir).values())

    def _workers_without_report(self) -> list[int]:
        reports = read_worker_reports(self._rank_dir)
        return [rank for rank in registered_workers(self._rank_dir) if rank not in reports]

    def _find_lost_worker(self) -> None:
        """Remember the first rank that is gone without a report; later ones are lost because of it."""
        pids = registered_workers(self._rank_dir)
        if self._lost_worker is not None and pids.get(self._lost_worker.rank) != self._lost_worker.pid:
            self._lost_worker = None  # torchrun has restarted the rank
        if self._lost_worker is not None or self._killed or self._killed_survivors:
            return
        gone = {rank: pid for rank, pid in pids.items() if not processes.is_alive(pid)}
        reports = read_worker_reports(self._rank_dir)  # read after the processes: a rank reports before it exits
        hang = any(report.exit_code == ExitCode.HANG for report in reports.values())  # the lost rank was killed for it
        lost = [LostWorker(rank, pid) for rank, pid in gone.items() if rank not in reports]
        self._lost_worker = lost[0] if lost and not hang else None

    def _group_exit(self, status: int) -> GroupExit:
        return GroupExit(
            reports=read_worker_reports(self._rank_dir),
            lost_worker=self._explain_lost_worker(status),
            stop_requested=self._shutdown.requested,
            killed=self._killed,
            status=status,
            launcher_output="\n".join(self._launcher_output().splitlines()[-20:]),
            grace_seconds=self._spec.grace_seconds,
        )

    def _explain_lost_worker(self, status: int) -> LostWorker | None:
        """Return the lost rank with its exit status: the child's own, or what the rank's parent recorded."""
        lost = self._lost_worker
        if lost is None:
            return None
        exit_status = status if self._spec.single_process else read_exit_status(self._rank_dir, lost.pid)
        return LostWorker(lost.rank, lost.pid, exit_status, host_info.oom_kill_count() > self._oom_kills_before)

    def _launcher_output(self) -> str:
        with self._launcher_log.open("rb") as file:
            file.seek(self._launcher_log_offset)
            return file.read().decode("utf-8", "replace")
