"""The ledger of a run's wall time: lives, gaps, repeated updates, and clocks that jump."""

import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from podscale.errors import PodscaleError
from podscale.telemetry.catalogue import GOODPUT_STATES, RESTART_CAUSES
from podscale.telemetry.events import EventLog, newest_step
from podscale.telemetry.goodput import (
    GoodputState,
    GoodputTracker,
    GoodputWriter,
    after_join,
    after_launch,
    read_goodput_state,
    write_goodput_state,
)
from podscale.telemetry.phases import PHASES
from podscale.telemetry.registry import MetricRegistry


class Clocks:
    """A monotonic clock and a calendar, moved by hand."""

    def __init__(self, calendar: float = 1000.0) -> None:
        self.monotonic, self.calendar = 50.0, calendar

    def pass_by(self, seconds: float) -> None:
        self.monotonic += seconds
        self.calendar += seconds

    def ledger(self, book: GoodputState) -> GoodputTracker:
        return GoodputTracker(book, clock=lambda: self.monotonic, calendar=lambda: self.calendar)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def update(clocks: Clocks, ledger: GoodputTracker, step: int, data: float = 1.0, work: float = 2.0) -> None:
    ledger.enter_phase("data_wait")
    clocks.pass_by(data)
    ledger.enter_phase("forward_backward")
    clocks.pass_by(work / 2)
    ledger.enter_phase("optimizer")
    clocks.pass_by(work / 2)
    ledger.step_done(step)


def spent(book: GoodputState) -> dict[str, float]:
    """The states that took time."""
    return {state: seconds for state, seconds in book.seconds.items() if seconds}


def a_life(clocks: Clocks, past: GoodputState | None, restored: int, steps: int, age: float = 5.0) -> GoodputTracker:
    """A life that began `age` seconds ago, found a checkpoint and trained."""
    ledger = clocks.ledger(after_join(past, clocks.calendar, age, 0))
    ledger.enter_restore()
    clocks.pass_by(3.0)
    ledger.start(restored)
    clocks.pass_by(1.0)
    for step in range(restored + 1, restored + steps + 1):
        update(clocks, ledger, step)
    return ledger


def test_the_states_of_a_first_life(clocks: Clocks) -> None:
    ledger = a_life(clocks, None, 0, 3)
    ledger.enter_phase("checkpoint")
    clocks.pass_by(0.5)
    ledger.enter_phase("evaluation")
    clocks.pass_by(4.0)
    book = ledger.state()
    assert spent(book) == {
        "init": 5.0 + 1.0 + 1.0,  # imports, the way from the restore to the loop, and the first batch
        "checkpoint_restore": 3.0,
        "compile": 2.0,
        "data_wait": 2.0,
        "productive": 4.0,
        "checkpoint_save": 0.5,
        "evaluation": 4.0,
    }
    assert book.wall_seconds == book.time - book.began == book.age
    assert book.goodput == pytest.approx(4.0 / book.wall_seconds)


def test_after_a_kill_the_gap_is_recovery_and_lost_updates_are_redone(clocks: Clocks) -> None:
    killed = a_life(clocks, None, 0, 7).state()
    clocks.pass_by(60.0)
    ledger = a_life(clocks, killed, 5, 4)
    book = ledger.state()
    assert book.seconds["recovery"] == 60.0 - 5.0  # the new pod had been there for 5 s
    assert book.redone == 2
    assert book.seconds["redo"] == 3.0  # of update 7; the first of a life, 6, is told apart
    assert book.seconds["compile"] == 2 * 2.0
    assert book.seconds["productive"] == (6 + 2) * 2.0
    assert book.reached == book.step == 9
    assert book.restarts == {"preempted": 0, "lost_rank": 1, "hang": 0, "failed": 0}
    assert (book.life, book.wall_seconds) == (2, book.time - book.began)


def test_evaluations_and_saves_between_repeated_updates_keep_their_name(clocks: Clocks) -> None:
    killed = a_life(clocks, None, 0, 9).state()
    ledger = a_life(clocks, killed, 0, 3, age=0.0)
    ledger.enter_phase("evaluation")
    clocks.pass_by(2.0)
    ledger.enter_phase("checkpoint")
    clocks.pass_by(1.0)
    assert (ledger.state().seconds["evaluation"], ledger.state().seconds["checkpoint_save"]) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("ended", "gap", "cause"),
    [
        ("done", "idle", None),
        ("preempted", "idle", "preempted"),
        ("lost_rank", "recovery", "lost_rank"),
        ("hang", "recovery", "hang"),
        ("failed", "recovery", "failed"),
        ("", "recovery", "lost_rank"),
    ],
)
def test_how_a_life_ended_names_the_gap_and_the_restart(
    clocks: Clocks, ended: str, gap: str, cause: str | None
) -> None:
    before = a_life(clocks, None, 0, 2).state(ended)
    book = after_launch(before, before.time + 30.0, 4.0)
    assert {state: book.seconds[state] for state in ("idle", "recovery")} == {"idle": 0, "recovery": 0, gap: 26.0}
    assert {name for name, count in book.restarts.items() if count} == ({cause} if cause else set())
    assert book.ended == ""


def test_a_life_that_never_came_to_train_counts_too(clocks: Clocks) -> None:
    """Its launch is on record; the training of the next one finds it."""
    first = after_launch(None, clocks.calendar, 2.0)
    clocks.pass_by(20.0)
    second = after_launch(first, clocks.calendar, 2.0)
    clocks.pass_by(3.0)
    book = after_join(second, clocks.calendar, 5.0, 0)
    assert book.life == 2
    assert spent(book) == {"init": 2.0 + 5.0, "recovery": 18.0}
    assert book.restarts["lost_rank"] == 1


def test_ranks_that_are_started_again_inside_their_pod_begin_a_life(clocks: Clocks) -> None:
    trained = a_life(clocks, after_launch(None, clocks.calendar, 1.0), 0, 2).state()
    clocks.pass_by(10.0)
    book = after_join(trained, clocks.calendar, 4.0, 0)
    assert (book.life, book.seconds["recovery"], book.restarts["lost_rank"]) == (2, 6.0, 1)


@pytest.mark.parametrize("jump", [-1e9, -40.0, 1e6])
def test_a_calendar_that_jumps_during_a_life_changes_nothing(clocks: Clocks, jump: float) -> None:
    ledger = a_life(clocks, None, 0, 2)
    before = ledger.state()
    clocks.calendar += jump
    update(clocks, ledger, 3)
    assert ledger.state().wall_seconds == before.wall_seconds + 3.0


def test_a_calendar_that_goes_back_between_lives_costs_the_gap_only(clocks: Clocks) -> None:
    before = a_life(clocks, None, 0, 2).state()
    book = after_launch(before, before.time - 500.0, 4.0)
    assert book.seconds == before.seconds
    assert after_join(book, before.time - 490.0, 14.0, 0).seconds["init"] == before.seconds["init"] + 14.0


def test_updates_known_from_the_log_are_redone_too(tmp_path: Path, clocks: Clocks) -> None:
    """A heartbeat may be older than the last updates before a kill."""
    with EventLog(tmp_path / "metrics.jsonl") as log:
        for step in (8, 9, 3):
            log.step(step, epoch=0.0, loss=1.0, learning_rate=0.1, images_per_second=1.0, phases={})
        log.event("resumed", step=2, padding="x" * 70_000)
        log.step(4, epoch=0.0, loss=1.0, learning_rate=0.1, images_per_second=1.0, phases={})
    assert newest_step(tmp_path / "metrics.jsonl") == 4  # those before are out of sight, and in the book
    assert newest_step(tmp_path / "none") == 0
    assert after_join(a_life(clocks, None, 0, 2).state(), clocks.calendar, 0.0, 4).reached == 4


EVENTS = st.lists(
    st.tuples(st.sampled_from([*PHASES, "updated", "kill", "restore"]), st.floats(0, 1e4), st.floats(-1e5, 1e5)),
    max_size=60,
)


@settings(deadline=None)
@given(EVENTS)
def test_whatever_happens_the_states_add_up(events: list[tuple[str, float, float]]) -> None:
    """Kills at any moment, gaps of any length and calendars that jump while a life lasts."""
    clocks = Clocks(1e9)
    book = after_join(None, clocks.calendar, 1.0, 0)
    ledger, alive, gaps, step = clocks.ledger(book), 1.0, 0.0, 0
    for what, seconds, jump in events:
        if what == "updated":
            step += 1
            ledger.step_done(step)
        elif what == "kill":
            book = ledger.state()
            gap = max(0.0, seconds + jump)
            clocks.calendar = book.time + gap
            gaps += gap
            ledger, step = clocks.ledger(after_join(book, clocks.calendar, 0.0, 0)), 0
        else:
            ledger.enter_restore() if what == "restore" else ledger.enter_phase(what)
            clocks.monotonic += seconds
            clocks.calendar += jump
            alive += seconds
        now = ledger.state()
        assert min(now.seconds.values()) >= 0
        assert all(now.seconds[state] >= book.seconds[state] - 1e-3 for state in GOODPUT_STATES)
        assert now.wall_seconds == pytest.approx(alive + gaps, abs=1e-3)


def test_what_is_exported(clocks: Clocks) -> None:
    registry = CollectorRegistry()
    ledger = clocks.ledger(after_launch(a_life(clocks, None, 0, 3).state("hang"), clocks.calendar, 0.0))
    readings = MetricRegistry(run="r", rank="0")
    readings.add_source(ledger)
    registry.register(readings)
    labels = {"run": "r", "rank": "0"}
    for state in GOODPUT_STATES:
        value = registry.get_sample_value("podscale_train_wall_seconds_total", {**labels, "state": state})
        assert value == ledger.state().seconds[state]
    for cause in RESTART_CAUSES:
        value = registry.get_sample_value("podscale_train_restarts_total", {**labels, "cause": cause})
        assert value == (cause == "hang")


@pytest.mark.parametrize(("ended", "cause"), [("preempted", "preempted"), ("done", "done"), ("", "lost_rank")])
def test_when_a_launch_began_and_why(clocks: Clocks, ended: str, cause: str) -> None:
    """The time is that of the launch, whatever the training has done since."""

    def exported(ledger: GoodputTracker) -> list[tuple[str, tuple[str, ...], float]]:
        return [sample for sample in ledger.samples() if sample[0] == "train_launch_timestamp_seconds"]

    began = clocks.calendar - 3.0
    first = clocks.ledger(after_join(after_launch(None, clocks.calendar, 3.0), clocks.calendar, 3.0, 0))
    assert exported(first) == [("train_launch_timestamp_seconds", ("first",), began)]
    clocks.pass_by(10.0)
    assert exported(first) == [("train_launch_timestamp_seconds", ("first",), began)]
    again = after_launch(first.state(ended), clocks.calendar + 50.0, 2.0)
    clocks.pass_by(55.0)
    second = clocks.ledger(after_join(again, clocks.calendar, 7.0, 0))
    assert exported(second) == [("train_launch_timestamp_seconds", (cause,), clocks.calendar - 7.0)]
    assert GoodputState.parse(second.state().to_json()) == second.state()


@pytest.fixture
def kept(tmp_path: Path, clocks: Clocks) -> tuple[Path, GoodputTracker]:
    return tmp_path / ".heartbeat", clocks.ledger(after_launch(None, clocks.calendar, 1.0))


def test_a_heartbeat_is_read_as_it_was_written(kept: tuple[Path, GoodputTracker]) -> None:
    path, ledger = kept
    heartbeat = GoodputWriter(ledger, path, None, interval_seconds=600)
    assert read_goodput_state(path) == ledger.state()
    ledger.step_done(4)
    heartbeat.close("preempted")
    assert read_goodput_state(path) == ledger.state("preempted")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"time": "x"}', "\x00" * 300])
def test_a_damaged_heartbeat_is_none(kept: tuple[Path, GoodputTracker], damage: str) -> None:
    path, ledger = kept
    write_goodput_state(path, ledger.state())
    found = read_goodput_state(path)
    assert found is not None
    path.write_text(damage)
    assert read_goodput_state(path) is None
    path.write_text(found.to_json().replace('"reached": 0', '"reached": -3'))
    assert read_goodput_state(path) is None
    path.write_bytes(b"\xff\xfe")
    assert read_goodput_state(path) is None


def test_heartbeats_that_cannot_be_written_do_not_hurt(
    kept: tuple[Path, GoodputTracker], caplog: pytest.LogCaptureFixture
) -> None:
    path, ledger = kept
    gone = path.parent / "gone" / ".heartbeat"
    with caplog.at_level(logging.WARNING):
        GoodputWriter(ledger, gone, None, interval_seconds=0.001).close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{gone}: heartbeats are being lost: No such file or directory"
    ]


def test_a_late_writer_leaves_the_book_of_the_newer_launch(kept: tuple[Path, GoodputTracker]) -> None:
    path, ledger = kept
    path.write_text("the newer launch's")

    def refuse() -> None:
        raise PodscaleError("another launch has taken over")

    GoodputWriter(ledger, path, refuse, interval_seconds=0.001).close("done")
    assert path.read_text() == "the newer launch's"
