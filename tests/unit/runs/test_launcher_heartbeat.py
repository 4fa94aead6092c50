"""Heartbeat of a pipeline's launcher, and the pod that watches it on a clock of its own."""

import errno
import time
from pathlib import Path

import pytest

from podscale.errors import ABSENT, JobAbandoned
from podscale.runs import Lease, LeaseLost, RunDirectory, launcher_heartbeat
from podscale.runs.launcher_heartbeat import (
    LauncherHeartbeat,
    LauncherMonitor,
    check_not_abandoned,
    forget_silence,
    heartbeat_interval,
    is_abandoned,
    read_silence,
)
from podscale.util import env
from tests.support.refusals import refused

GRACE = 80.0
"""Seconds; a look every 10 s."""


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    beat(run := RunDirectory(tmp_path), 0)
    return run


def beat(run: RunDirectory, number: int) -> None:
    run.launcher_heartbeat.write_text(str(number))


def look(monitor: LauncherMonitor, clock: Clock, times: int, *, is_leader: bool = True) -> bool:
    for _ in range(times):
        clock.seconds += heartbeat_interval(GRACE)
        monitor.poll(is_leader=is_leader)
    return monitor.is_lost


def test_the_first_heartbeat_precedes_the_job_and_the_next_ones_differ(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "r")  # the launcher may be the first to write there
    with LauncherHeartbeat(run, grace_seconds=0.4):
        first = run.launcher_heartbeat.read_text()
        for _ in range(200):
            if run.launcher_heartbeat.read_text() != first:
                break
            time.sleep(0.02)
        assert run.launcher_heartbeat.read_text() != first
    last = run.launcher_heartbeat.read_text()
    time.sleep(0.2)
    assert run.launcher_heartbeat.read_text() == last
    with LauncherHeartbeat(run, grace_seconds=60):  # another launcher
        assert run.launcher_heartbeat.read_text() != last


def test_a_volume_that_cannot_be_written_stops_no_launcher(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with LauncherHeartbeat(RunDirectory(tmp_path / "file" / "r"), grace_seconds=60):
        pass
    assert len(caplog.records) == 1


def test_a_launcher_that_may_not_write_the_run_directory_is_refused(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its job would stop after the grace time, for a reason that only a warning shows."""

    def refuse(path: Path, value: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(launcher_heartbeat, "write_json", refuse)
    with refused(field=run.path), LauncherHeartbeat(run, grace_seconds=60):
        pass


def test_a_heartbeat_that_changes_keeps_the_job(run: RunDirectory, clock: Clock) -> None:
    monitor = LauncherMonitor(run, "train", GRACE, clock=clock)
    for number in range(30):
        beat(run, number // 5)  # a slow launcher
        assert not look(monitor, clock, 1)
    assert not is_abandoned(run, "train")


def test_silence_for_the_grace_time_abandons_the_job_for_good(run: RunDirectory, clock: Clock) -> None:
    monitor = LauncherMonitor(run, "train", GRACE, clock=clock)
    assert not look(monitor, clock, 8)  # the first look only learns the content
    assert look(monitor, clock, 1)
    assert is_abandoned(run, "train")
    assert not is_abandoned(run, "evaluate")
    beat(run, 1)
    assert look(monitor, clock, 3), "the other pods may have seen the mark already"
    with refused(kind=JobAbandoned, got=ABSENT):
        check_not_abandoned(run, "train", {env.LAUNCHER_GRACE: str(GRACE)})
    check_not_abandoned(run, "train", {})  # a job of `podscale submit`
    check_not_abandoned(run, "evaluate", {env.LAUNCHER_GRACE: str(GRACE)})
    forget_silence(run)
    check_not_abandoned(run, "train", {env.LAUNCHER_GRACE: str(GRACE)})
    forget_silence(run)


def test_another_pod_finds_the_mark_even_if_it_waits_for_a_leader_that_has_ended(
    run: RunDirectory, clock: Clock
) -> None:
    leader, other = (LauncherMonitor(run, "train", GRACE, clock=clock) for _ in range(2))
    assert not look(other, clock, 1, is_leader=False)
    assert look(leader, clock, 9)
    assert look(other, clock, 1, is_leader=False)


def test_another_pod_decides_later_if_the_leading_pod_never_starts(run: RunDirectory, clock: Clock) -> None:
    other = LauncherMonitor(run, "train", GRACE, clock=clock)
    assert not look(other, clock, 11, is_leader=False)
    assert read_silence(run, "train") is None, "only the leading pod records the silence"
    assert look(other, clock, 1, is_leader=False)
    assert is_abandoned(run, "train")


def test_a_missing_heartbeat_is_silence(run: RunDirectory, clock: Clock) -> None:
    run.launcher_heartbeat.unlink()
    assert look(LauncherMonitor(run, "train", GRACE, clock=clock), clock, 9)


def test_restarts_of_the_pod_do_not_reset_the_silence(run: RunDirectory, clock: Clock) -> None:
    for _ in range(3):
        assert not look(LauncherMonitor(run, "train", GRACE, clock=clock), clock, 3)
    silence = read_silence(run, "train")
    assert silence is not None
    assert silence.seconds >= GRACE / 2
    assert look(LauncherMonitor(run, "train", GRACE, clock=clock), clock, 4)


def test_the_silence_before_another_heartbeat_does_not_count(run: RunDirectory, clock: Clock) -> None:
    assert not look(LauncherMonitor(run, "train", GRACE, clock=clock), clock, 8)
    beat(run, 1)
    assert not look(LauncherMonitor(run, "train", GRACE, clock=clock), clock, 8)


def test_a_pod_that_was_frozen_does_not_count_that_time(run: RunDirectory, clock: Clock) -> None:
    monitor = LauncherMonitor(run, "train", GRACE, clock=clock)
    look(monitor, clock, 2)
    clock.seconds += 3600
    assert not monitor.poll(is_leader=True)


def test_a_volume_that_does_not_answer_says_nothing_about_the_launcher(run: RunDirectory, clock: Clock) -> None:
    monitor = LauncherMonitor(run, "train", GRACE, clock=clock)
    look(monitor, clock, 2)
    run.launcher_heartbeat.unlink()
    run.launcher_heartbeat.mkdir()  # an OSError, as of a mount that is gone
    assert not look(monitor, clock, 20)


def test_a_pod_whose_run_another_launch_has_taken_marks_nothing(run: RunDirectory, clock: Clock) -> None:
    lease = Lease.acquire(run.lease)
    lease.release()
    monitor = LauncherMonitor(run, "train", GRACE, fence=lease.check, clock=clock)
    with Lease.acquire(run.lease), pytest.raises(LeaseLost):
        look(monitor, clock, 9)
    assert read_silence(run, "train") is None


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"stage": "train"}', '{"unknown": 1}'])
def test_a_damaged_record_counts_as_none(run: RunDirectory, content: str) -> None:
    run.launcher_silence.write_text(content)
    assert read_silence(run, "train") is None
