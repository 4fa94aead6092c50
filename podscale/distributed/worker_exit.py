"""Exit report of a worker: each writes its exit code and error into the rank directory, where the launcher reads it."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from podscale.util.files import write_json


@dataclass(frozen=True)
class WorkerReport:
    """A rank's own report: its exit code, and the error as shown to people."""

    exit_code: int
    error: str


def report_path(rank_dir: Path, rank: int) -> Path:
    return rank_dir / f"outcome-{rank}.json"


def write_worker_report(rank_dir: Path, rank: int, report: WorkerReport) -> None:
    write_json(report_path(rank_dir, rank), asdict(report))


def report_and_exit(rank_dir: Path, rank: int, report: WorkerReport, *, local_rank: int) -> NoReturn:
    """Write the report and exit at once: an ordinary shutdown would wait for threads that wait for a lost peer."""
    write_worker_report(rank_dir, rank, report)
    if report.error and local_rank != 0:  # the launcher shows local rank 0's error
        print(report.error, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(report.exit_code)


def read_worker_reports(rank_dir: Path) -> dict[int, WorkerReport]:
    reports = {}
    for path in rank_dir.glob("outcome-*.json"):
        try:
            reports[int(path.stem.partition("-")[2])] = WorkerReport(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            continue  # half written by a rank that was killed: no report
    return dict(sorted(reports.items()))


def register_worker(rank_dir: Path, rank: int) -> None:
    write_json(rank_dir / f"rank-{rank}.json", {"pid": os.getpid()})


def registered_workers(rank_dir: Path) -> dict[int, int]:
    """Return the process ids of this pod's ranks, by rank."""
    return {
        int(path.stem.partition("-")[2]): int(json.loads(path.read_text(encoding="utf-8"))["pid"])
        for path in sorted(rank_dir.glob("rank-*.json"))
    }


def write_exit_status(rank_dir: Path, pid: int, status: int) -> None:
    """Record the exit status of a rank's process, as in Popen.returncode. Its parent calls this."""
    write_json(rank_dir / f"exit-{pid}.json", {"status": status})


def read_exit_status(rank_dir: Path, pid: int) -> int | None:
    """Return the exit status of a process; None if its parent recorded none."""
    try:
        recorded = json.loads((rank_dir / f"exit-{pid}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # the parent may have been killed while it wrote
        return None
    return int(recorded["status"])
