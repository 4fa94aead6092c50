"""One launch of a pod's ranks: start, watch and stop them, and turn their exits into the result of the stage.

The launcher is the child process that starts the ranks: torchrun, our `fork_launcher`, or a single rank itself.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType

from podscale.distributed.gpu_failure import RUNBOOK, find_gpu_failure
from podscale.distributed.worker_env import WorkerEnv
from podscale.distributed.worker_exit import WorkerReport, read_exit_status, read_worker_reports, registered_workers
from podscale.errors import ExitCode
from podscale.launch.process_cleanup import kill_launch_processes
from podscale.launch.rendezvous import log_rendezvous_progress
from podscale.launch.worker_spec import WorkerSpec
from podscale.util import env, host_info, processes
from podscale.util.processes import DUPLICATE_SIGNAL_SECONDS, signal_name
from podscale.util.shared_memory import shared_memory

POLL_SECONDS = 0.1
SURVIVOR_GRACE_SECONDS = 15.0
"""Time after a failure until the surviving ranks are killed, seconds; enough for them to report their own error."""
LOG_TAIL_BYTES = 1 << 20
"""Bytes at the end of a rank's log that are searched for a failed GPU."""
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
CONTINUES = "the same command continues from the newest checkpoint"


class ShutdownRequest:
    """Handler of stop signals: the first asks the ranks to save and exit, a second kills them.

    Under `podscale run` one request may send two signals, from that command and from the process group. A second signal
    is therefore ignored here, and that command kills this process on a second request.
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
        self.requested, self.requested_at = True, time.monotonic()


@dataclass(frozen=True)
class LostWorker:
    """Rank that exited without a report; `status` as in Popen.returncode (negative: a signal), None if unknown.

    `gpu_failure` is CUDA's text in the log of a rank that aborted, as NCCL's watchdog does if it sees the error first.
    """

    rank: int
    pid: int
    status: int | None = None
    out_of_memory: bool = False
    gpu_failure: str = ""

    def __str__(self) -> str:
        if self.status is not None and self.status < 0:
            how = f"was killed by {signal_name(-self.status)}"
        elif self.status is not None:
            how = f"exited with code {self.status} without a report"
        else:
            how = "exited without a report (it was probably killed)"
        memory = "; the container ran out of memory: lower the batch or raise the limit" if self.out_of_memory else ""
        gpu = f" after its GPU failed ({self.gpu_failure}; see {RUNBOOK})" if self.gpu_failure else ""
        return f"rank {self.rank} (process {self.pid}) {how}{gpu}{memory}"


@dataclass(frozen=True)
class GroupExit:
    """Exit of a worker group.

    Args:
        lost_worker: First rank that exited without a report.
        killed: Ranks were killed after the grace period.
        status: Exit code of the launcher.
        launcher_output: Last lines of the launcher's log.
    """

    reports: Mapping[int, WorkerReport]
    lost_worker: LostWorker | None = None
    stop_requested: bool = False
    killed: bool = False
    status: int = 0
    launcher_output: str = ""
    grace_seconds: float = 0.0


@dataclass(frozen=True)
class StageResult:
    """Exit code and error of a stage in this pod; the run's result if `is_leader`, because rank 0 ran here."""

    exit_code: int
    error: str
    is_leader: bool = True


class WorkerGroup:
    """One launch of this pod's ranks.

    Args:
        on_poll: Called every `POLL_SECONDS`, with True if rank 0 runs in this pod.
    """

    def __init__(
        self, spec: WorkerSpec, worker_env: WorkerEnv, shutdown: ShutdownRequest, on_poll: Callable[[bool], None]
    ) -> None:
        self._spec, self._worker_env, self._shutdown, self._on_poll = spec, worker_env, shutdown, on_poll
        self._rank_dir = worker_env.rank_directory
        assert worker_env.log_directory is not None
        self._launcher_log = worker_env.log_directory / f"launcher-{spec.rendezvous.node_rank or 0}.log"
        self._launcher_log_offset = self._launcher_log.stat().st_size if self._launcher_log.exists() else 0
        self._rank_log_sizes = {path: path.stat().st_size for path in worker_env.log_directory.glob("rank-*.log")}
        self._lost_worker: LostWorker | None = None
        self._oom_kills_before = host_info.oom_kill_count()
        self._stop_forwarded = False
        self._killed = False
        self._failed_since: float | None = None
        self._killed_survivors = False

    def run(self) -> StageResult:
        """Start the launcher, wait until it exits, and kill every remaining process of the launch."""
        shutil.rmtree(self._rank_dir)  # files of the previous launch
        self._rank_dir.mkdir(mode=0o700)
        with shared_memory("podscale-decoded-cache", self._spec.shared_cache_bytes) as decoded_cache:
            group_exit = self._run_launcher(decoded_cache)
        return replace(stage_result(group_exit), is_leader=self._is_leader)

    def _run_launcher(self, decoded_cache: str | None) -> GroupExit:
        child = self._spec.start(self._worker_env, self._launcher_log, decoded_cache)
        try:
            with log_rendezvous_progress(self._spec.rendezvous, lambda: bool(registered_workers(self._rank_dir))):
                while child.poll() is None:
                    self._poll()
                    self._forward_stop(child)
                    self._kill_survivors()
                    time.sleep(POLL_SECONDS)
        finally:
            kill_launch_processes(self._rank_dir)
            child.wait()
        self._poll()
        return self._group_exit(child.returncode)

    @property
    def _is_leader(self) -> bool:
        """True if rank 0 runs in this pod, or would have run here."""
        known = self._spec.rendezvous.is_leader
        return 0 in registered_workers(self._rank_dir) if known is None else known

    def _poll(self) -> None:
        self._find_lost_worker()
        self._on_poll(self._is_leader)

    def _forward_stop(self, child: "subprocess.Popen[bytes]") -> None:
        """Send SIGTERM to the launcher after a stop request; kill all after the grace period or a second request."""
        shutdown = self._shutdown
        if not shutdown.requested:
            return
        if not self._stop_forwarded:
            self._stop_forwarded = True
            child.send_signal(signal.SIGTERM)
        grace_exceeded = time.monotonic() - shutdown.requested_at > self._spec.config.launch.grace_seconds
        if (grace_exceeded or shutdown.repeated) and not self._killed:
            pids, reports = registered_workers(self._rank_dir), read_worker_reports(self._rank_dir)
            self._killed = not pids or any(rank not in reports for rank in pids)  # else all have reported
            kill_launch_processes(self._rank_dir)

    def _kill_survivors(self) -> None:
        """Kill the ranks that still run SURVIVOR_GRACE_SECONDS after one failed."""
        if self._spec.uses_torchrun and self._spec.config.launch.max_restarts:
            return  # torchrun restarts the ranks itself
        if self._failed_since is None and (self._lost_worker is not None or self._has_failed()):
            self._failed_since = time.monotonic()
        since = self._failed_since
        if since is not None and time.monotonic() - since > SURVIVOR_GRACE_SECONDS and not self._killed_survivors:
            self._killed_survivors = True
            kill_launch_processes(self._rank_dir)

    def _has_failed(self) -> bool:
        no_failure = (ExitCode.DONE, ExitCode.PREEMPTED)
        return any(report.exit_code not in no_failure for report in read_worker_reports(self._rank_dir).values())

    def _find_lost_worker(self) -> None:
        """Find the first rank that exited without a report; ranks that are lost later are a consequence."""
        pids = registered_workers(self._rank_dir)
        if self._lost_worker is not None and pids.get(self._lost_worker.rank) != self._lost_worker.pid:
            self._lost_worker = None  # torchrun has restarted the rank
        if self._lost_worker is not None or self._killed or self._killed_survivors:
            return
        gone = {rank: pid for rank, pid in pids.items() if not processes.is_alive(pid)}
        reports = read_worker_reports(self._rank_dir)  # read after the processes: a rank reports before it exits
        hang = any(report.exit_code == ExitCode.HANG for report in reports.values())  # gone ranks were killed for it
        lost = [LostWorker(rank, pid) for rank, pid in gone.items() if rank not in reports]
        self._lost_worker = lost[0] if lost and not hang else None

    def _logged_gpu_failure(self, rank: int) -> str:
        """Return CUDA's text in what a rank has logged in this launch; "" if there is none."""
        assert self._worker_env.log_directory is not None
        path = self._worker_env.log_directory / f"rank-{rank}.log"
        if not path.exists():
            return ""
        with path.open("rb") as file:
            start = self._rank_log_sizes.get(path, 0)
            file.seek(max(start, path.stat().st_size - LOG_TAIL_BYTES))
            failure = find_gpu_failure(file.read().decode("utf-8", "replace"))
        return failure.reason if failure else ""

    def _group_exit(self, status: int) -> GroupExit:
        lost = self._lost_worker
        if lost is not None:
            # The child is the rank itself, or the rank's parent recorded its exit status.
            lost_status = status if self._spec.single_process else read_exit_status(self._rank_dir, lost.pid)
            lost = replace(
                lost,
                status=lost_status,
                out_of_memory=host_info.oom_kill_count() > self._oom_kills_before,
                gpu_failure=self._logged_gpu_failure(lost.rank) if lost_status == -signal.SIGABRT else "",
            )
        with self._launcher_log.open("rb") as file:
            file.seek(self._launcher_log_offset)
            output = file.read().decode("utf-8", "replace")
        return GroupExit(
            reports=read_worker_reports(self._rank_dir),
            lost_worker=lost,
            stop_requested=self._shutdown.requested,
            killed=self._killed,
            status=status,
            launcher_output="\n".join(output.splitlines()[-20:]),
            grace_seconds=self._spec.config.launch.grace_seconds,
        )


def stage_result(group_exit: GroupExit) -> StageResult:
    """Return the exit code and error of the rank that caused the end, not of the peer losses that follow from it.

    Causes in order: bad input, other errors, a requested stop, a lost rank, a hang, a lost peer.
    """
    culprit = _first_with_code(group_exit.reports, ExitCode.BAD_INPUT) or _first_failure(group_exit.reports)
    if culprit:
        return culprit
    if group_exit.killed:
        return StageResult(
            int(ExitCode.FAILED),
            "a stop was requested, but not every rank exited within "
            f"launch.grace_seconds={group_exit.grace_seconds:g}, so they were killed; {CONTINUES}",
        )
    stopped = _first_with_code(group_exit.reports, ExitCode.PREEMPTED)
    # torchrun asks the peers of a lost rank to stop, so a stop alone does not mean that one was requested.
    if stopped and (group_exit.stop_requested or group_exit.lost_worker is None):
        return stopped
    witness = _first_with_code(group_exit.reports, ExitCode.HANG) or _first_with_code(
        group_exit.reports, ExitCode.PEER_LOST
    )
    if group_exit.lost_worker is not None:
        return _lost_worker_result(group_exit.lost_worker, witness)
    if witness:
        return witness
    if group_exit.stop_requested and not group_exit.reports:
        return StageResult(int(ExitCode.PREEMPTED), "stopped on request before any rank had started")
    if group_exit.status != 0 and not group_exit.reports:
        return StageResult(
            int(ExitCode.FAILED), f"the ranks could not be started:\n{group_exit.launcher_output}".rstrip()
        )
    return StageResult(int(ExitCode.DONE), "")


def _first_with_code(reports: Mapping[int, WorkerReport], code: ExitCode) -> StageResult | None:
    for rank, report in reports.items():
        if report.exit_code == code:
            return StageResult(int(code), report.error or f"rank {rank} exited with code {int(code)}")
    return None


def _first_failure(reports: Mapping[int, WorkerReport]) -> StageResult | None:
    known = {int(code) for code in ExitCode} - {int(ExitCode.FAILED)}
    for rank, report in reports.items():
        if report.exit_code not in known:
            return StageResult(int(ExitCode.FAILED), f"rank {rank}: {report.error or f'exit code {report.exit_code}'}")
    return None


def _lost_worker_result(lost: LostWorker, witness_result: StageResult | None) -> StageResult:
    """Return a failure if the rank itself crashed, else a loss that allows a restart.

    `witness_result` is the error of a peer that waited for the rank; its first line names the collective.
    """
    crashed = lost.status is not None and (lost.status >= 0 or -lost.status in CRASH_SIGNALS)
    code = ExitCode.FAILED if crashed else ExitCode.PEER_LOST
    witness = f" ({witness_result.error.splitlines()[0]})" if witness_result is not None else ""
    return StageResult(int(code), f"{lost}{witness}; {CONTINUES}")
