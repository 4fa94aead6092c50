"""From how the ranks ended to how the stage ended."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from podscale.errors import ExitCode
from podscale.files import write_json

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class RankOutcome:
    """A rank's own report: its exit code, and the error as shown to people."""

    exit_code: int
    error: str


@dataclass(frozen=True)
class LostRank:
    """A rank that ended without a report; `status` as in Popen.returncode (negative: a signal), None if unknown."""

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
            how = "ended without a report (it was probably killed)"
        memory = "; the container ran out of memory: lower the batch or raise its limit" if self.out_of_memory else ""
        return f"rank {self.rank} (process {self.pid}) {how}{memory}"


@dataclass(frozen=True)
class Ending:
    """Everything known when the child of a supervisor has ended.

    reports: the ranks' own; lost: the first rank that ended without one; stopped: a stop was requested;
    killed: ranks that had to be killed when the grace time was over; launcher: the last lines of the launcher's log.
    """

    reports: Mapping[int, RankOutcome]
    lost: LostRank | None = None
    stopped: bool = False
    killed: bool = False
    status: int = 0
    launcher: str = ""
    grace_seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """How a stage ended in this pod; `leads`: rank 0 was here, so this is the run's own ending."""

    exit_code: int
    error: str
    leads: bool = True


def judge(ending: Ending) -> Verdict:
    """The exit code of the stage and the culprit's own words.

    A rank's own error explains more than the loss of a peer that follows from it, so the order is: bad input, other
    errors, a requested stop, a lost rank, a hang, `peer lost`.
    """
    culprit = _first(ending.reports, ExitCode.BAD_INPUT) or _first_failure(ending.reports)
    if culprit:
        return culprit
    if ending.killed:
        return Verdict(int(ExitCode.FAILED), _not_stopped(ending))
    stopped = _first(ending.reports, ExitCode.PREEMPTED)
    if stopped and (ending.stopped or ending.lost is None):  # torchrun asks the peers of a lost rank to stop
        return stopped
    witness = _first(ending.reports, ExitCode.HANG) or _first(ending.reports, ExitCode.PEER_LOST)
    if ending.lost is not None:
        return _judge_lost(ending.lost, witness)
    if witness:
        return witness
    if ending.stopped and not ending.reports:
        return Verdict(int(ExitCode.PREEMPTED), "stopped on request before any rank had started")
    if ending.status != 0 and not ending.reports:
        return Verdict(int(ExitCode.FAILED), f"the ranks could not be started:\n{ending.launcher}".rstrip())
    return Verdict(int(ExitCode.DONE), "")


def outcome_path(rank_dir: Path, rank: int) -> Path:
    return rank_dir / f"outcome-{rank}.json"


def write_rank_outcome(rank_dir: Path, rank: int, outcome: RankOutcome) -> None:
    write_json(outcome_path(rank_dir, rank), asdict(outcome))


def end_process(rank_dir: Path, rank: int, outcome: RankOutcome) -> NoReturn:
    """Records how this rank ended and ends its process at once.

    After a lost peer an ordinary shutdown would wait for threads that wait for the peer.
    """
    write_rank_outcome(rank_dir, rank, outcome)
    if outcome.error and os.environ.get("LOCAL_RANK", "0") != "0":  # the first one's log people see, and the verdict
        print(outcome.error, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(outcome.exit_code)


def read_rank_outcomes(rank_dir: Path) -> dict[int, RankOutcome]:
    """The reports of this pod's ranks, by rank."""
    outcomes = {}
    for path in rank_dir.glob("outcome-*.json"):
        try:
            outcomes[int(path.stem.partition("-")[2])] = RankOutcome(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            continue  # half written by a rank that was killed: no report
    return dict(sorted(outcomes.items()))


def register_rank(rank_dir: Path, rank: int) -> None:
    """Says which process is which rank."""
    write_json(rank_dir / f"rank-{rank}.json", {"pid": os.getpid()})


def registered_ranks(rank_dir: Path) -> dict[int, int]:
    """Process ids of this pod's ranks, by rank."""
    return {
        int(path.stem.partition("-")[2]): int(json.loads(path.read_text(encoding="utf-8"))["pid"])
        for path in sorted(rank_dir.glob("rank-*.json"))
    }


def write_exit_status(rank_dir: Path, pid: int, status: int) -> None:
    """Record how a rank's process ended, as its parent saw it; `status` as in Popen.returncode."""
    write_json(rank_dir / f"exit-{pid}.json", {"status": status})


def read_exit_status(rank_dir: Path, pid: int) -> int | None:
    """Return what `write_exit_status` recorded of a process; None if its parent recorded nothing."""
    try:
        recorded = json.loads((rank_dir / f"exit-{pid}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # the parent may have been killed while it wrote
        return None
    return int(recorded["status"])


def _first(reports: Mapping[int, RankOutcome], code: ExitCode) -> Verdict | None:
    for rank, report in reports.items():
        if report.exit_code == code:
            return Verdict(int(code), report.error or f"rank {rank} ended with code {int(code)}")
    return None


def _first_failure(reports: Mapping[int, RankOutcome]) -> Verdict | None:
    known = {int(code) for code in ExitCode} - {int(ExitCode.FAILED)}
    for rank, report in reports.items():
        if report.exit_code not in known:
            return Verdict(int(ExitCode.FAILED), f"rank {rank}: {report.error or f'exit code {report.exit_code}'}")
    return None


def _judge_lost(lost: LostRank, noticed: Verdict | None) -> Verdict:
    """A crash of the rank itself is a failure; one that was taken from outside is worth a restart.

    noticed: how a peer that waited for it put it; the first line says in which collective.
    """
    crashed = lost.status is not None and (lost.status >= 0 or -lost.status in CRASHES)
    code = ExitCode.FAILED if crashed else ExitCode.PEER_LOST
    witness = f" ({noticed.error.splitlines()[0]})" if noticed is not None else ""
    return Verdict(int(code), f"{lost}{witness}; the same command continues from the newest checkpoint")


def _not_stopped(ending: Ending) -> str:
    return (
        f"a stop was requested, but not every rank ended within launch.grace_seconds={ending.grace_seconds:g}: they "
        "were killed; the same command continues from the newest checkpoint"
    )
