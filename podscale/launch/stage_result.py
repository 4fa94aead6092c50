"""Exit code and error of a stage, derived from the exits of its ranks."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from podscale.distributed.worker_exit import WorkerReport
from podscale.errors import ExitCode

CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)

CONTINUES = "the same command continues from the newest checkpoint"


@dataclass(frozen=True)
class LostWorker:
    """Rank that exited without a report; `status` as in Popen.returncode (negative: a signal), None if unknown."""

    rank: int
    pid: int
    status: int | None = None
    out_of_memory: bool = False

    def __str__(self) -> str:
        if self.status is not None and self.status < 0:
            how = f"was killed by {signal.Signals(-self.status).name}"
        elif self.status is not None:
            how = f"exited with code {self.status} without a report"
        else:
            how = "exited without a report (it was probably killed)"
        memory = "; the container ran out of memory: lower the batch or raise the limit" if self.out_of_memory else ""
        return f"rank {self.rank} (process {self.pid}) {how}{memory}"


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
