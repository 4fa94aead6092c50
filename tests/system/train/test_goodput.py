"""Goodput of a run that is really killed and stopped: its states add up to the wall time since the first launch.

The gap between launches is counted, and so are exactly the steps that had to be repeated.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podscale.errors import ExitCode
from podscale.runs.checkpoint.format import steps_on_disk
from podscale.telemetry.events import newest_step, read_records
from podscale.telemetry.goodput import GoodputState, read_goodput_state
from tests.support.commands import Command

RUN = "ledger"


@pytest.fixture
def start(calm: Path) -> Iterator[Callable[[], Command]]:
    started: list[Command] = []

    def begin() -> Command:
        started.append(Command(calm, "train", "run.yaml", "--set", f"run.id={RUN}"))
        return started[-1]

    yield begin
    for command in started:
        command.kill()


def book_of(run: Path) -> GoodputState:
    """Return the goodput file once its states add up to the wall time since the first launch."""
    book = read_goodput_state(run / ".heartbeat")
    assert book is not None
    assert min(book.seconds.values()) >= 0
    assert book.wall_seconds == pytest.approx(book.time - book.started_at, abs=0.3, rel=0.01)
    return book


def resumed_at(run: Path) -> int:
    """Return the step from which the newest launch resumed."""
    return next(r["step"] for r in reversed(list(read_records(run / "metrics.jsonl"))) if r.get("event") == "resumed")


def forget_checkpoints(run: Path, step: int) -> None:
    """Remove the checkpoints from `step` on, so that steps are repeated wherever the kill came."""
    for on_disk, path in steps_on_disk(run / "checkpoints").items():
        if on_disk >= step:
            shutil.rmtree(path)


@pytest.mark.slow
def test_the_ledger_of_a_run_that_is_killed_and_stopped_adds_up(start: Callable[[], Command], calm: Path) -> None:
    run = calm / "runs" / RUN
    begun = time.time()
    command = start()
    command.wait_for_steps(run, 8)
    command.process.kill()
    command.end()
    killed, reached = book_of(run), newest_step(run / "metrics.jsonl")
    forget_checkpoints(run, max(reached, killed.highest_step))
    assert (killed.exit_cause, killed.redone_steps, killed.seconds["redo"]) == ("", 0, 0)
    assert begun - 0.3 < killed.started_at < begun + 60

    command = start()
    command.wait_for(lambda: newest_step(run / "metrics.jsonl") > max(reached, killed.highest_step) + 1)
    os.killpg(command.process.pid, signal.SIGTERM)
    ended = command.end()
    assert ended.code == ExitCode.PREEMPTED, ended.err
    stopped = book_of(run)
    assert stopped.exit_cause == "preempted"
    assert stopped.redone_steps == max(reached, killed.highest_step) - resumed_at(run) > 0
    assert stopped.seconds["redo"] > 0 or stopped.redone_steps == 1  # the first of a launch counts as compile
    assert stopped.seconds["recovery"] > command.started - killed.time - 0.3

    time.sleep(1.0)  # no launch is running
    command = start()
    ended = command.end()
    assert ended.code == ExitCode.DONE, ended.err
    done = book_of(run)
    assert (done.exit_cause, done.launch) == ("done", 3)
    assert done.seconds["idle"] > 1.0
    for state in ("redo", "recovery"):
        assert done.seconds[state] == stopped.seconds[state], "no step is lost after a stop on request"
    assert done.redone_steps == stopped.redone_steps
    assert done.restarts == {"preempted": 1, "lost_rank": 1, "hang": 0, "failed": 0}

    event = next(r for r in read_records(run / "metrics.jsonl") if r.get("event") == "goodput" and r["life"] == 3)
    assert event["seconds"]["redo"] == pytest.approx(done.seconds["redo"], abs=1e-3)
    assert event["goodput"] == pytest.approx(event["seconds"]["productive"] / sum(event["seconds"].values()), abs=1e-3)
