"""One life of a pod's ranks: started, watched, asked to stop, and how they ended."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from podscale import devices, env, processes
from podscale.errors import ExitCode
from podscale.launch import joining, local, orphans
from podscale.launch.follow import LogDisplay
from podscale.launch.outcomes import GroupExit, LostWorker
from podscale.launch.podtask import WorkerSpec
from podscale.launch.tracking import TrackerProcesses
from podscale.rundir import Lease, RunDirectory
from podscale.stopping import DUPLICATE_SIGNAL_SECONDS
from podscale.worker_exit import read_exit_status, read_worker_reports, registered_workers

POLL_SECONDS = 0.1
SURVIVOR_GRACE_SECONDS = 15.0
"""Once a rank has failed, the others have this long to find out and say so; a rank that is stopped never does."""


class ShutdownRequest:
    """A stop request: the first asks the ranks to save and end, a second does not wait for them.

    Under `podscale run` the first may come twice, from there and as a signal to the whole process group; whoever
    insists ends this process from there.
    """

    def __init__(self) -> None:
        self.requested = False
        self.insisted = False
        self.since = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.ask()
        elif time.monotonic() - self.since > DUPLICATE_SIGNAL_SECONDS and env.LAUNCHER_PID not in os.environ:
            self.insisted = True

    def ask(self) -> None:
        """The first request."""
        self.requested, self.since = True, time.monotonic()


class WorkerGroup:
    """One life of this pod's ranks."""

    def __init__(
        self,
        task: WorkerSpec,
        run: RunDirectory,
        rank_dir: Path,
        logs: Path,
        lease: Lease | None,
        stop: ShutdownRequest,
        display: LogDisplay,
        trackers: TrackerProcesses,
        variables: Mapping[str, str],
    ) -> None:
        self._task = task
        self._rank_dir = rank_dir
        self._stop = stop
        self._launcher_log = logs / f"launcher-{task.rendezvous.node_rank or 0}.log"
        self._launcher_begin = self._launcher_log.stat().st_size if self._launcher_log.exists() else 0
        self._display = display
        self._trackers = trackers
        self._variables = local.launch_environment(
            task, rank_dir, logs, os.environ, lease=run.lease, fence=lease.number if lease else None
        )
        self._variables |= variables
        self._first_lost: LostWorker | None = None
        self._memory_kills = devices.oom_kill_count()
        self._forwarded = 0
        self._killed = False
        self._failed_since: float | None = None
        self._hastened = False

    def run(self) -> GroupExit:
        """Starts the child and waits for its end; afterwards no process of it is left."""
        shutil.rmtree(self._rank_dir)  # of the attempt before
        self._rank_dir.mkdir(mode=0o700)
        child = local.start_launcher(
            local.launch_command(self._task, self._rank_dir), self._variables, self._launcher_log
        )
        try:
            with joining.log_rendezvous_progress(
                self._task.rendezvous, lambda: bool(registered_workers(self._rank_dir))
            ):
                while child.poll() is None:
                    self._display.update()
                    self._look_at_trackers()
                    self._find_lost()
                    self._pass_stop_on(child)
                    self._end_aftermath()
                    time.sleep(POLL_SECONDS)
        finally:
            orphans.kill_launch_processes(self._rank_dir)
            child.wait()
        self._look_at_trackers()
        self._find_lost()
        self._display.update()
        return self._ending(child.returncode)

    @property
    def leads(self) -> bool:
        """Whether rank 0 runs, or would have run, in this pod."""
        known = self._task.leads
        return 0 in registered_workers(self._rank_dir) if known is None else known

    def _look_at_trackers(self) -> None:
        """Where the pods have yet to find out which of them leads, its trackers begin now; others never do."""
        if self._task.leads is None and self.leads:
            self._trackers.begin()
        self._trackers.look()
        if self._trackers.failure and not self._stop.requested:
            self._stop.ask()

    def _pass_stop_on(self, child: "subprocess.Popen[bytes]") -> None:
        stop = self._stop
        if stop.requested and not self._forwarded:
            self._forwarded = 1
            child.send_signal(signal.SIGTERM)
        over = time.monotonic() - stop.since > self._task.grace_seconds or stop.insisted
        if stop.requested and over and not self._killed:
            self._killed = self._unreported() != [] or not registered_workers(self._rank_dir)
            orphans.kill_launch_processes(self._rank_dir)

    def _end_aftermath(self) -> None:
        if self._task.by_torchrun and self._task.max_restarts:
            return  # it starts the ranks again itself
        if self._failed_since is None and (self._first_lost is not None or self._has_failed()):
            self._failed_since = time.monotonic()
        since = self._failed_since
        if since is not None and time.monotonic() - since > SURVIVOR_GRACE_SECONDS and not self._hastened:
            self._hastened = True
            orphans.kill_launch_processes(self._rank_dir)

    def _has_failed(self) -> bool:
        """Whether a rank has reported its failure."""
        fine = (ExitCode.DONE, ExitCode.PREEMPTED)
        return any(report.exit_code not in fine for report in read_worker_reports(self._rank_dir).values())

    def _unreported(self) -> list[int]:
        reports = read_worker_reports(self._rank_dir)
        return [rank for rank in registered_workers(self._rank_dir) if rank not in reports]

    def _find_lost(self) -> None:
        """Remember the first rank that is gone without a report; later ones are lost because of it."""
        pids = registered_workers(self._rank_dir)
        if self._first_lost is not None and pids.get(self._first_lost.rank) != self._first_lost.pid:
            self._first_lost = None  # torchrun has started the rank again
        if self._first_lost is not None or self._killed or self._hastened:
            return
        gone = {rank: pid for rank, pid in pids.items() if not processes.is_alive(pid)}
        reports = read_worker_reports(self._rank_dir)  # after the look at the processes: a report comes before the end
        hang = any(report.exit_code == ExitCode.HANG for report in reports.values())  # then it was killed for that
        lost = [LostWorker(rank, pid) for rank, pid in gone.items() if rank not in reports]
        self._first_lost = lost[0] if lost and not hang else None

    def _ending(self, status: int) -> GroupExit:
        return GroupExit(
            reports=read_worker_reports(self._rank_dir),
            lost=self._explained(status),
            stopped=self._stop.requested,
            killed=self._killed,
            status=status,
            launcher="\n".join(self._launcher_output().splitlines()[-20:]),
            grace_seconds=self._task.grace_seconds,
        )

    def _explained(self, status: int) -> LostWorker | None:
        """Return the lost rank with its exit status: the child's own, or what the rank's parent recorded."""
        lost = self._first_lost
        if lost is None:
            return None
        how = status if self._task.alone else read_exit_status(self._rank_dir, lost.pid)
        return LostWorker(lost.rank, lost.pid, how, devices.oom_kill_count() > self._memory_kills)

    def _launcher_output(self) -> str:
        with self._launcher_log.open("rb") as file:
            file.seek(self._launcher_begin)
            return file.read().decode("utf-8", "replace")
