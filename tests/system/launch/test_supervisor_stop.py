"""A supervisor that is stopped or killed: ranks save within the grace time, and no process is left."""

import os
import signal
import time
from pathlib import Path

import pytest

from podscale.runs import Lease
from tests.support.supervised import Launch


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_lets_the_rank_save(launch: Launch, number: signal.Signals) -> None:
    run = launch(all="long")
    run.wait_for(lambda: (run.run_directory / "metrics.jsonl").exists())
    run.process.send_signal(number)
    code, _, err = run.end(20)
    assert code == 75, err
    assert run.members() == []


def test_a_stop_before_training_begins_loses_nothing(launch: Launch) -> None:
    run = launch("launch.processes=2", all="long")
    run.wait_for(lambda: (run.run_directory / "environment.json").exists())
    run.process.terminate()
    code, _, err = run.end(30)
    assert code == 75, err
    assert run.members() == []


def test_a_rank_that_ignores_the_stop_is_killed_after_the_grace_time(launch: Launch) -> None:
    run = launch("launch.grace_seconds=1", all="stubborn")
    run.wait_for_ranks(1)
    started = time.monotonic()
    run.process.terminate()
    code, _, err = run.end(20)
    assert time.monotonic() - started >= 1
    assert code == 1
    assert "launch.grace_seconds=1" in err.splitlines()[-1]
    assert run.members() == []


def test_a_second_interrupt_does_not_wait(launch: Launch) -> None:
    run = launch("launch.grace_seconds=600", all="stubborn")
    run.wait_for_ranks(1)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    code, _, _ = run.end(20)
    assert code == 1


def test_two_ranks_stop_on_request(launch: Launch) -> None:
    run = launch("launch.processes=2", all="long")
    run.wait_for(lambda: (run.run_directory / "metrics.jsonl").exists())
    run.process.terminate()
    code, _, err = run.end(60)
    assert code == 75, err
    assert "stopped" in err.splitlines()[-1]


def test_kill_9_of_the_supervisor_leaves_no_rank(launch: Launch) -> None:
    run = launch("launch.processes=2", all="stubborn")
    run.wait_for_ranks(2)
    assert len(run.members()) >= 3  # fork launcher, two ranks
    run.process.kill()
    run.process.communicate()  # returns only when no process holds our pipes any more
    deadline = time.monotonic() + 10
    while run.members() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert run.members() == []
    Lease.acquire(run.run_directory / ".lease").release()


def test_processes_that_ranks_started_end_too(launch: Launch) -> None:
    run = launch(all="with_grandchild")
    run.wait_for_ranks(1)
    (rank,) = [
        pid
        for pid in run.members()
        if b"plain_rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and b"worker_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(rank, signal.SIGKILL)
    assert run.end(20)[0] == 77
    assert run.members() == []
