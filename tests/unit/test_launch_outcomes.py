"""From how ranks ended to the exit code and the message."""

import subprocess
import sys
from pathlib import Path

import pytest

from podscale.launch.orphans import ancestors, end_all, members
from podscale.launch.outcomes import Ending, LostRank, Verdict, judge
from podscale.processes import alive
from podscale.worker_exit import (
    RankOutcome,
    outcome_path,
    read_rank_outcomes,
    register_rank,
    registered_ranks,
    write_rank_outcome,
)

DONE, PEER = RankOutcome(0, ""), RankOutcome(77, "a peer is gone")
SAVED, HANG = RankOutcome(75, "saved step 3"), RankOutcome(76, "no progress for 60 s")
BAD, BUG = RankOutcome(2, "wrong classes"), RankOutcome(1, "KeyError: 'x'")
LOST = LostRank(1, 42, -9)


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        (Ending({0: DONE, 1: DONE}), 0, ""),
        (Ending({0: DONE, 1: DONE}, status=-11), 0, ""),  # a crash after the report has cost nothing
        (Ending({0: BUG, 1: BAD}, lost=LOST), 2, "wrong classes"),
        (Ending({0: PEER, 1: BUG}), 1, "rank 1: KeyError"),
        (Ending({0: PEER, 1: RankOutcome(139, "")}), 1, "rank 1: exit code 139"),
        (Ending({0: PEER, 1: HANG}), 76, "no progress"),
        (Ending({0: SAVED, 1: PEER}, stopped=True), 75, "saved step 3"),
        (Ending({0: PEER}, lost=LOST, status=1), 77, "rank 1 (process 42) was killed by SIGKILL"),
        (Ending({0: PEER, 1: PEER}), 77, "a peer is gone"),
        (Ending({0: PEER}, lost=LostRank(1, 42, None)), 77, "ended without a report"),
        (Ending({0: PEER}, lost=LostRank(1, 42, -11)), 1, "SIGSEGV"),
        (Ending({0: PEER}, lost=LostRank(1, 42, 5)), 1, "exited with code 5"),
        (Ending({}, lost=LostRank(0, 42, -9, out_of_memory=True)), 77, "ran out of memory"),
        (Ending({0: SAVED}, stopped=True, killed=True, grace_seconds=30), 1, "launch.grace_seconds=30"),
        (Ending({}, stopped=True, status=-15), 75, "before any rank had started"),
        (Ending({}, status=1, launcher="ImportError: x"), 1, "could not be started:\nImportError: x"),
    ],
)
def test_the_verdict(ending: Ending, code: int, words: str) -> None:
    verdict = judge(ending)
    assert verdict.exit_code == code
    assert words in verdict.error
    assert (verdict.error == "") == (code == 0)


def test_reports_are_read_back_and_half_ones_left_out(tmp_path: Path) -> None:
    write_rank_outcome(tmp_path, 10, BUG)
    write_rank_outcome(tmp_path, 2, DONE)
    outcome_path(tmp_path, 3).write_text('{"exit_code": 0')
    assert read_rank_outcomes(tmp_path) == {2: DONE, 10: BUG}
    register_rank(tmp_path, 5)
    assert list(registered_ranks(tmp_path)) == [5]
    assert judge(Ending(read_rank_outcomes(tmp_path))) == Verdict(1, "rank 10: KeyError: 'x'")


def test_members_are_found_by_their_environment_and_ended(tmp_path: Path) -> None:
    environment = {"PODSCALE_RANK_DIR": str(tmp_path)}
    ours = subprocess.Popen(["/bin/sleep", "600"], env=environment, start_new_session=True)
    other = subprocess.Popen(["/bin/sleep", "600"], env={"PODSCALE_RANK_DIR": f"{tmp_path}-other"})
    try:
        while not members(tmp_path):  # between fork and exec it still has our environment
            assert ours.poll() is None
        assert end_all(tmp_path) == [ours.pid]
        assert ours.wait(10) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_ancestors_go_up_to_the_first_process() -> None:
    chain = list(ancestors())
    assert chain[-1] in (0, 1)
    assert all(alive(pid) for pid in chain if pid)


def test_a_process_whose_supervisor_is_gone_ends_at_once() -> None:
    dead = subprocess.Popen(["/bin/true"])
    dead.wait()
    code = "import os; os.environ['PODSCALE_SUPERVISOR'] = '%d'; from podscale.launch.orphans import die_with_parent; "
    code += "die_with_parent(); print('alive')"
    ended = subprocess.run([sys.executable, "-c", code % dead.pid], capture_output=True)
    assert (ended.returncode, ended.stdout) == (-9, b"")
