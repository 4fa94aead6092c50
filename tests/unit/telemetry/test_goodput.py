"""Goodput: launches, gaps, repeated steps, and clocks that jump."""

import json
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
    """Fake monotonic clock and wall clock."""

    def __init__(self, wall: float = 1000.0) -> None:
        self.monotonic, self.wall = 50.0, wall

    def pass_by(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds

    def tracker(self, state: GoodputState) -> GoodputTracker:
        return GoodputTracker(state, clock=lambda: self.monotonic, wall_clock=lambda: self.wall)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def train_step(clocks: Clocks, tracker: GoodputTracker, step: int) -> None:
    tracker.enter_phase("data_wait")
    clocks.pass_by(1.0)
    tracker.enter_phase("forward_backward")
    clocks.pass_by(1.0)
    tracker.enter_phase("optimizer")
    clocks.pass_by(1.0)
    tracker.step_done(step)


def nonzero_seconds(state: GoodputState) -> dict[str, float]:
    """Return the states that took time."""
    return {name: seconds for name, seconds in state.seconds.items() if seconds}


def train_launch(
    clocks: Clocks, previous: GoodputState | None, restored: int, steps: int, age: float = 5.0
) -> GoodputTracker:
    """Run a launch that began `age` seconds ago, restored a checkpoint and trained."""
    tracker = clocks.tracker(after_join(previous, clocks.wall, age, 0))
    tracker.enter_restore()
    clocks.pass_by(3.0)
    tracker.start(restored)
    clocks.pass_by(1.0)
    for step in range(restored + 1, restored + steps + 1):
        train_step(clocks, tracker, step)
    return tracker


def test_the_states_of_a_first_launch(clocks: Clocks) -> None:
    tracker = train_launch(clocks, None, 0, 3)
    tracker.enter_phase("checkpoint")
    clocks.pass_by(0.5)
    tracker.enter_phase("evaluation")
    clocks.pass_by(4.0)
    state = tracker.state()
    assert nonzero_seconds(state) == {
        "init": 5.0 + 1.0 + 1.0,  # imports, from the restore to the loop, and the first batch
        "checkpoint_restore": 3.0,
        "compile": 2.0,
        "data_wait": 2.0,
        "productive": 4.0,
        "checkpoint_save": 0.5,
        "evaluation": 4.0,
    }
    assert state.wall_seconds == state.time - state.started_at == state.age
    assert state.goodput == pytest.approx(4.0 / state.wall_seconds)


def test_after_a_kill_the_gap_is_recovery_and_lost_steps_are_redone(clocks: Clocks) -> None:
    killed = train_launch(clocks, None, 0, 7).state()
    clocks.pass_by(60.0)
    tracker = train_launch(clocks, killed, 5, 4)
    state = tracker.state()
    assert state.seconds["recovery"] == 60.0 - 5.0  # the new pod had run for 5 s
    assert state.redone_steps == 2
    assert state.seconds["redo"] == 3.0  # of step 7; the first step of a launch, 6, counts as compile
    assert state.seconds["compile"] == 2 * 2.0
    assert state.seconds["productive"] == (6 + 2) * 2.0
    assert state.highest_step == state.step == 9
    assert state.restarts == {"preempted": 0, "lost_rank": 1, "hang": 0, "failed": 0}
    assert (state.launch, state.wall_seconds) == (2, state.time - state.started_at)


def test_evaluations_and_saves_between_repeated_steps_keep_their_state(clocks: Clocks) -> None:
    killed = train_launch(clocks, None, 0, 9).state()
    tracker = train_launch(clocks, killed, 0, 3, age=0.0)
    tracker.enter_phase("evaluation")
    clocks.pass_by(2.0)
    tracker.enter_phase("checkpoint")
    clocks.pass_by(1.0)
    assert (tracker.state().seconds["evaluation"], tracker.state().seconds["checkpoint_save"]) == (2.0, 1.0)


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
def test_how_a_launch_ended_names_the_gap_and_the_restart(
    clocks: Clocks, ended: str, gap: str, cause: str | None
) -> None:
    before = train_launch(clocks, None, 0, 2).state(ended)
    state = after_launch(before, before.time + 30.0, 4.0)
    assert {name: state.seconds[name] for name in ("idle", "recovery")} == {"idle": 0, "recovery": 0, gap: 26.0}
    assert {name for name, count in state.restarts.items() if count} == ({cause} if cause else set())
    assert state.exit_cause == ""


def test_a_launch_that_never_trained_counts_too(clocks: Clocks) -> None:
    """The goodput file has the launch, and the training of the next launch finds it."""
    first = after_launch(None, clocks.wall, 2.0)
    clocks.pass_by(20.0)
    second = after_launch(first, clocks.wall, 2.0)
    clocks.pass_by(3.0)
    state = after_join(second, clocks.wall, 5.0, 0)
    assert state.launch == 2
    assert nonzero_seconds(state) == {"init": 2.0 + 5.0, "recovery": 18.0}
    assert state.restarts["lost_rank"] == 1


def test_ranks_that_are_started_again_inside_their_pod_begin_train_launch(clocks: Clocks) -> None:
    trained = train_launch(clocks, after_launch(None, clocks.wall, 1.0), 0, 2).state()
    clocks.pass_by(10.0)
    state = after_join(trained, clocks.wall, 4.0, 0)
    assert (state.launch, state.seconds["recovery"], state.restarts["lost_rank"]) == (2, 6.0, 1)


@pytest.mark.parametrize("jump", [-1e9, -40.0, 1e6])
def test_a_wall_clock_that_jumps_during_a_launch_changes_nothing(clocks: Clocks, jump: float) -> None:
    tracker = train_launch(clocks, None, 0, 2)
    before = tracker.state()
    clocks.wall += jump
    train_step(clocks, tracker, 3)
    assert tracker.state().wall_seconds == before.wall_seconds + 3.0


def test_a_wall_clock_that_goes_back_between_launches_costs_the_gap_only(clocks: Clocks) -> None:
    before = train_launch(clocks, None, 0, 2).state()
    state = after_launch(before, before.time - 500.0, 4.0)
    assert state.seconds == before.seconds
    assert after_join(state, before.time - 490.0, 14.0, 0).seconds["init"] == before.seconds["init"] + 14.0


def test_steps_known_from_the_log_are_redone_too(tmp_path: Path, clocks: Clocks) -> None:
    """A heartbeat may be older than the last steps before a kill."""
    with EventLog(tmp_path / "metrics.jsonl") as log:
        for step in (8, 9, 3):
            log.step(step, epoch=0.0, loss=1.0, learning_rate=0.1, images_per_second=1.0, phases={})
        log.event("resumed", step=2, padding="x" * 70_000)
        log.step(4, epoch=0.0, loss=1.0, learning_rate=0.1, images_per_second=1.0, phases={})
    assert newest_step(tmp_path / "metrics.jsonl") == 4  # those before are in the state
    assert newest_step(tmp_path / "none") == 0
    assert after_join(train_launch(clocks, None, 0, 2).state(), clocks.wall, 0.0, 4).highest_step == 4


EVENTS = st.lists(
    st.tuples(st.sampled_from([*PHASES, "updated", "kill", "restore"]), st.floats(0, 1e4), st.floats(-1e5, 1e5)),
    max_size=60,
)


@settings(deadline=None)
@given(EVENTS)
def test_whatever_happens_the_states_add_up(events: list[tuple[str, float, float]]) -> None:
    """Kills at any moment, gaps of any length and wall clocks that jump during a launch."""
    clocks = Clocks(1e9)
    state = after_join(None, clocks.wall, 1.0, 0)
    tracker, alive, gaps, step = clocks.tracker(state), 1.0, 0.0, 0
    for what, seconds, jump in events:
        if what == "updated":
            step += 1
            tracker.step_done(step)
        elif what == "kill":
            state = tracker.state()
            gap = max(0.0, seconds + jump)
            clocks.wall = state.time + gap
            gaps += gap
            tracker, step = clocks.tracker(after_join(state, clocks.wall, 0.0, 0)), 0
        else:
            tracker.enter_restore() if what == "restore" else tracker.enter_phase(what)
            clocks.monotonic += seconds
            clocks.wall += jump
            alive += seconds
        now = tracker.state()
        assert min(now.seconds.values()) >= 0
        assert all(now.seconds[name] >= state.seconds[name] - 1e-3 for name in GOODPUT_STATES)
        assert now.wall_seconds == pytest.approx(alive + gaps, abs=1e-3)


def test_exported_metrics(clocks: Clocks) -> None:
    registry = CollectorRegistry()
    tracker = clocks.tracker(after_launch(train_launch(clocks, None, 0, 3).state("hang"), clocks.wall, 0.0))
    metrics = MetricRegistry(run="r", rank="0")
    metrics.add_source(tracker)
    registry.register(metrics)
    labels = {"run": "r", "rank": "0"}
    for name in GOODPUT_STATES:
        value = registry.get_sample_value("podscale_train_wall_seconds_total", {**labels, "state": name})
        assert value == tracker.state().seconds[name]
    for cause in RESTART_CAUSES:
        value = registry.get_sample_value("podscale_train_restarts_total", {**labels, "cause": cause})
        assert value == (cause == "hang")


@pytest.mark.parametrize(("ended", "cause"), [("preempted", "preempted"), ("done", "done"), ("", "lost_rank")])
def test_when_a_launch_began_and_why(clocks: Clocks, ended: str, cause: str) -> None:
    """The time is that of the launch, also after the training has updated the state."""

    def exported(tracker: GoodputTracker) -> list[tuple[str, tuple[str, ...], float]]:
        return [sample for sample in tracker.samples() if sample[0] == "train_launch_timestamp_seconds"]

    began = clocks.wall - 3.0
    first = clocks.tracker(after_join(after_launch(None, clocks.wall, 3.0), clocks.wall, 3.0, 0))
    assert exported(first) == [("train_launch_timestamp_seconds", ("first",), began)]
    clocks.pass_by(10.0)
    assert exported(first) == [("train_launch_timestamp_seconds", ("first",), began)]
    again = after_launch(first.state(ended), clocks.wall + 50.0, 2.0)
    clocks.pass_by(55.0)
    second = clocks.tracker(after_join(again, clocks.wall, 7.0, 0))
    assert exported(second) == [("train_launch_timestamp_seconds", (cause,), clocks.wall - 7.0)]
    assert GoodputState.parse(second.state().to_json()) == second.state()


@pytest.fixture
def goodput_file(tmp_path: Path, clocks: Clocks) -> tuple[Path, GoodputTracker]:
    return tmp_path / ".heartbeat", clocks.tracker(after_launch(None, clocks.wall, 1.0))


def test_a_heartbeat_is_read_as_it_was_written(goodput_file: tuple[Path, GoodputTracker]) -> None:
    path, tracker = goodput_file
    writer = GoodputWriter(tracker, path, None, interval_seconds=600)
    assert read_goodput_state(path) == tracker.state()
    tracker.step_done(4)
    writer.close("preempted")
    assert read_goodput_state(path) == tracker.state("preempted")
    assert list(path.parent.iterdir()) == [path]


def test_keys_of_the_file_outlive_names_in_the_code(clocks: Clocks) -> None:
    keys = "time began life age joined ended step reached redone cause seconds restarts"
    assert list(json.loads(after_launch(None, clocks.wall, 1.0).to_json())) == keys.split()


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"time": "x"}', "\x00" * 300])
def test_a_damaged_heartbeat_is_none(goodput_file: tuple[Path, GoodputTracker], damage: str) -> None:
    path, tracker = goodput_file
    write_goodput_state(path, tracker.state())
    restored = read_goodput_state(path)
    assert restored is not None
    path.write_text(damage)
    assert read_goodput_state(path) is None
    path.write_text(restored.to_json().replace('"reached": 0', '"reached": -3'))
    assert read_goodput_state(path) is None
    path.write_bytes(b"\xff\xfe")
    assert read_goodput_state(path) is None


def test_heartbeats_that_cannot_be_written_do_not_hurt(
    goodput_file: tuple[Path, GoodputTracker], caplog: pytest.LogCaptureFixture
) -> None:
    path, tracker = goodput_file
    gone = path.parent / "gone" / ".heartbeat"
    with caplog.at_level(logging.WARNING):
        GoodputWriter(tracker, gone, None, interval_seconds=0.001).close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{gone}: heartbeats are being lost: No such file or directory"
    ]


def test_a_late_writer_leaves_the_book_of_the_newer_launch(goodput_file: tuple[Path, GoodputTracker]) -> None:
    path, tracker = goodput_file
    path.write_text("the newer launch's")

    def refuse() -> None:
        raise PodscaleError("another launch has taken over")

    GoodputWriter(tracker, path, refuse, interval_seconds=0.001).close("done")
    assert path.read_text() == "the newer launch's"
