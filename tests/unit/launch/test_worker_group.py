"""Exit code and message of a stage, from the exits of its ranks."""

from pathlib import Path

import pytest

from podscale.distributed.worker_exit import (
    WorkerReport,
    read_worker_reports,
    register_worker,
    registered_workers,
    report_path,
    write_worker_report,
)
from podscale.launch.worker_group import GroupExit, LostWorker, StageResult, stage_result

DONE, PEER = WorkerReport(0, ""), WorkerReport(77, "a peer is gone")
SAVED, HANG = WorkerReport(75, "saved step 3"), WorkerReport(76, "no progress for 60 s")
BAD, BUG = WorkerReport(2, "wrong classes"), WorkerReport(1, "KeyError: 'x'")
LOST = LostWorker(1, 42, -9)


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        (GroupExit({0: DONE, 1: DONE}), 0, ""),
        (GroupExit({0: DONE, 1: DONE}, status=-11), 0, ""),  # a crash after all ranks reported success
        (GroupExit({0: BUG, 1: BAD}, lost_worker=LOST), 2, "wrong classes"),
        (GroupExit({0: PEER, 1: BUG}), 1, "rank 1: KeyError"),
        (GroupExit({0: PEER, 1: WorkerReport(139, "")}), 1, "rank 1: exit code 139"),
        (GroupExit({0: PEER, 1: HANG}), 76, "no progress"),
        (GroupExit({0: SAVED, 1: PEER}, stop_requested=True), 75, "saved step 3"),
        (GroupExit({0: PEER}, lost_worker=LOST, status=1), 77, "rank 1 (process 42) was killed by SIGKILL"),
        (GroupExit({0: PEER, 1: PEER}), 77, "a peer is gone"),
        (GroupExit({0: PEER}, lost_worker=LostWorker(1, 42, None)), 77, "exited without a report"),
        (GroupExit({0: PEER}, lost_worker=LostWorker(1, 42, -11)), 1, "SIGSEGV"),
        (GroupExit({0: PEER}, lost_worker=LostWorker(1, 42, -37)), 77, "killed by signal 37"),
        (GroupExit({0: PEER}, lost_worker=LostWorker(1, 42, 5)), 1, "exited with code 5"),
        (GroupExit({}, lost_worker=LostWorker(0, 42, -9, out_of_memory=True)), 77, "ran out of memory"),
        (GroupExit({0: SAVED}, stop_requested=True, killed=True, grace_seconds=30), 1, "launch.grace_seconds=30"),
        (GroupExit({}, stop_requested=True, status=-15), 75, "before any rank had started"),
        (GroupExit({}, status=1, launcher_output="ImportError: x"), 1, "could not be started:\nImportError: x"),
    ],
)
def test_the_verdict(ending: GroupExit, code: int, words: str) -> None:
    verdict = stage_result(ending)
    assert verdict.exit_code == code
    assert words in verdict.error
    assert (verdict.error == "") == (code == 0)


def test_reports_are_read_back_and_half_ones_left_out(tmp_path: Path) -> None:
    write_worker_report(tmp_path, 10, BUG)
    write_worker_report(tmp_path, 2, DONE)
    report_path(tmp_path, 3).write_text('{"exit_code": 0')
    assert read_worker_reports(tmp_path) == {2: DONE, 10: BUG}
    register_worker(tmp_path, 5)
    assert list(registered_workers(tmp_path)) == [5]
    assert stage_result(GroupExit(read_worker_reports(tmp_path))) == StageResult(1, "rank 10: KeyError: 'x'")
