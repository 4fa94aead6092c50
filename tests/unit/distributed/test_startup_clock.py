"""The clock of a launch's start, handed from process to process."""

import time

import pytest

from podscale.distributed import startup_clock
from podscale.distributed.startup_clock import StartupClock
from podscale.util import env
from tests.support.refusals import refused


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(startup_clock, "time", fake)
    return fake


def test_parts_add_up_over_the_processes_of_a_launch(clock_time: FakeTime) -> None:
    supervisor = StartupClock(started_at=90.0)
    supervisor.end_part("supervisor")
    clock_time.now += 5.0
    launcher = StartupClock.read(supervisor.variables())
    launcher.end_part("imports")
    clock_time.now += 2.0
    rank = StartupClock.read(launcher.variables())
    rank.end_part("rendezvous")
    clock_time.now += 0.5
    rank.end_part("imports")
    assert rank.seconds == pytest.approx({"supervisor": 10.0, "imports": 5.5, "rendezvous": 2.0})
    assert sum(rank.seconds.values()) == pytest.approx(rank.age())


def test_a_rank_that_torchrun_restarted_has_a_clock_of_its_own(clock_time: FakeTime) -> None:
    launcher = StartupClock(started_at=10.0, seconds={"supervisor": 80.0})
    restarted = StartupClock.read({**launcher.variables(), "TORCHELASTIC_RESTART_COUNT": "1"})
    assert restarted.seconds == {}
    assert StartupClock.read({**launcher.variables(), "TORCHELASTIC_RESTART_COUNT": "0"}) == launcher


def test_without_a_supervisor_the_process_is_the_launch() -> None:
    clock = StartupClock.read({})
    assert clock.seconds == {}
    assert 0.0 < clock.age() < time.monotonic()


def test_text_that_is_no_json_is_refused() -> None:
    with refused(field=env.STARTUP):
        StartupClock.read({env.LIFE_BEGAN: "1.0", env.STARTUP: "{"})
