"""metrics.jsonl and the step log made of it."""

import io
import json
import math
from pathlib import Path

import pytest

from podscale.runs import Lease, LeaseLost
from podscale.telemetry.events import EventLog, EventRecord, filter_replays, read_records
from podscale.telemetry.step_log import EtaEstimator, StepLog, format_record
from podscale.util.formatting import format_duration


def step(log: EventLog, number: int, loss: float = 1.0) -> None:
    log.step(number, epoch=number / 10, loss=loss, learning_rate=0.1, images_per_second=100.0, phases={"other": 0.5})


def test_lines_as_the_contract_says(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with EventLog(path) as log:
        log.event("start", total_steps=10)
        step(log, 1)
        log.evaluation(1, epoch=0.1, top1=0.5, top5=0.9, loss=2.0)
    start, line, evaluation = read_records(path)
    assert (start["kind"], start["event"], start["total_steps"]) == ("event", "start", 10)
    assert line.pop("time") == pytest.approx(start["time"], abs=60)
    assert line == {
        "kind": "step", "step": 1, "epoch": 0.1, "loss": 1.0, "learning_rate": 0.1, "images_per_second": 100.0,
        "phases": {"other": 0.5},
    }  # fmt: skip
    assert (evaluation["kind"], evaluation["top1"]) == ("evaluation", 0.5)


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    with EventLog(tmp_path / "m") as log:
        step(log, 1, loss=math.nan)
        log.event("x", values=[math.inf, 1.0])
    first, second = (json.loads(line) for line in (tmp_path / "m").read_text().splitlines())
    assert first["loss"] is None
    assert second["values"] == [None, 1.0]


def test_half_a_line_of_a_killed_writer_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"kind": "step", "step": 1, "lo')
    with EventLog(path) as log:
        log.event("start")
    assert [record["event"] for record in read_records(path)] == ["start"]


def test_a_late_writer_is_refused(tmp_path: Path) -> None:
    with Lease.acquire(tmp_path / ".lease") as lease:
        log = EventLog(tmp_path / "m", lease.check)
        log.event("start")
    with Lease.acquire(tmp_path / ".lease"), pytest.raises(LeaseLost):
        log.event("late")
    assert [record["event"] for record in read_records(tmp_path / "m")] == ["start"]


def test_a_full_disk_costs_lines_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(Path("/dev/full"))
    log.event("a")
    log.event("b")
    assert caplog.text.count("lines are being lost: No space left on device") == 1
    log.close()


def test_history_leaves_out_what_was_lost_and_done_again(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with EventLog(path) as log:
        log.event("start", step=0)
        for number in (1, 2, 3, 4):
            step(log, number, loss=1.0)
        log.evaluation(4, epoch=1, top1=0.1, top5=0.2, loss=1.0)
        log.event("resumed", step=2)
        for number in (3, 4, 5):
            step(log, number, loss=2.0)
    records = filter_replays(read_records(path))
    assert [(r["step"], r["loss"]) for r in records if r["kind"] == "step"] == [
        (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)
    ]  # fmt: skip
    assert [r["event"] for r in records if r["kind"] == "event"] == ["start", "resumed"]
    assert not [r for r in records if r["kind"] == "evaluation"]
    assert list(read_records(tmp_path / "missing")) == []


RECORD = {
    "time": 100.0, "kind": "step", "step": 20, "epoch": 1.25, "loss": 0.5, "learning_rate": 0.0125,
    "images_per_second": 1234.5,
    "phases": {"data_wait": 0.1, "forward_backward": 0.6, "allreduce_wait": 0.2, "optimizer": 0.1, "evaluation": 9.0},
}  # fmt: skip


def test_a_step_is_one_line_with_the_time_left() -> None:
    left = EtaEstimator()
    assert left.update({"time": 90.0, "kind": "event", "event": "start", "step": 0, "total_steps": 100}) is None
    seconds = left.update(RECORD)
    assert seconds == pytest.approx(40.0)
    line = format_record(RECORD, seconds)
    shares = "data 10%  compute 60%  wait 20%"  # fractions of the step time, without evaluations
    assert line == f"step     20  epoch 1.25  loss 0.5000  lr 0.0125      1,234 images/s  0:40 left  {shares}"
    assert format_record(RECORD, total=1500).startswith("step   20/1500  epoch")
    assert "not finite" in format_record({**RECORD, "loss": None})


def test_the_pace_counts_from_where_the_launch_continued() -> None:
    left = EtaEstimator()
    left.update({"time": 90.0, "kind": "event", "event": "start", "step": 0, "total_steps": 100})
    left.update({"time": 95.0, "kind": "event", "event": "resumed", "step": 15})
    assert left.update(RECORD) == pytest.approx(80 * 5 / 5)


def test_the_time_left_is_by_epochs_when_the_batch_changes() -> None:
    """50 steps of 100 images, then 10 of 500: 2 epochs of 5000 images at one speed in images."""
    left = EtaEstimator()
    start = {"kind": "event", "event": "start", "step": 0, "total_steps": 60, "epoch": 0.0, "total_epochs": 2.0}
    left.update({"time": 0.0, **start})
    step = {"kind": "step", "loss": 1.0}
    assert left.update({"time": 25.0, **step, "step": 25, "epoch": 0.5}) == pytest.approx(75.0)
    assert left.update({"time": 55.0, **step, "step": 51, "epoch": 1.1}) == pytest.approx(45.0)
    assert left.update({"time": 100.0, **step, "step": 60, "epoch": 2.0}) == 0.0
    left.update({"time": 200.0, **start, "event": "resumed", "step": 50, "epoch": 1.0})
    assert left.update({"time": 210.0, **step, "step": 52, "epoch": 1.2}) == pytest.approx(40.0)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (-1, "0:00")])
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


START = {
    "time": 1.0, "kind": "event", "event": "start", "step": 0, "total_steps": 90, "ranks": 2, "global_batch": 64,
    "device": "cpu", "parameters": 701466,
}  # fmt: skip
STRAGGLER = {
    "kind": "event",
    "rank": 3,
    "host": "node-b",
    "ratio": 1.625,
    "milliseconds": 65,
    "fastest_milliseconds": 40,
}
SECONDS = {"productive": 87.0, "init": 3.0, "redo": 9.6, "data_wait": 0.4, "idle": 0.0}


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"event": "new_thing", "key": 7, "error": "cut\x1b[31m\noff"}, r"new thing  key 7  error cut\x1b[31m | off"),
        (START, "start  2 processes on cpu  90 steps of 64 images  701,466 parameters"),
        (
            {**START, "event": "resumed", "step": 40},
            "resumed  after step 40  2 processes on cpu  90 steps of 64 images  701,466 parameters",
        ),
        (
            {"event": "checkpoint", "step": 90, "bytes": 5637328, "seconds": 0.0714},
            "checkpoint  step 90  5.4 MiB in 0.07 s",
        ),
        (
            {"event": "checkpoint_passed", "step": 40, "reason": "weights.bin:\nanother sha256"},
            "checkpoint of step 40 cannot be used: weights.bin: | another sha256",
        ),
        ({"event": "done", "step": 90, "skipped_updates": 0}, "done  step 90"),
        ({"event": "done", "step": 90, "skipped_updates": 2}, "done  step 90  2 skipped"),
        (
            {"event": "goodput", "goodput": 0.87, "wall_seconds": 100.0, "seconds": SECONDS},
            "goodput 87%  of 1:40  redo 10%  init 3%",
        ),
        (
            {**STRAGGLER, "event": "straggler"},
            "rank 3 on node-b is a straggler: busy 1.62 times as long as the fastest rank  65 ms per step, "
            "the fastest 40 ms",
        ),
        ({**STRAGGLER, "event": "straggler_over"}, "rank 3 on node-b is no longer a straggler"),
        (
            {"event": "launcher_lost", "grace_seconds": 1200.0},
            "the launcher of this job's pipeline was silent for 1200 s; saving and stopping",
        ),
        (
            {"event": "tracker_failed", "tracker": "wandb", "reason": "no key\nset"},
            "the tracker wandb failed, the run continues without it: no key | set",
        ),
        (
            {"kind": "evaluation", "step": 9, "epoch": 2.0, "top1": 0.9731, "top5": 1.0, "loss": 0.1},
            "evaluation  step 9  epoch 2.00  top-1 97.31%  top-5 100.00%  loss 0.1000",
        ),
    ],
)
def test_events_and_evaluations_as_text(record: EventRecord, text: str) -> None:
    assert format_record({"time": 1, "kind": "event", **record}) == text


def test_the_beginnings_of_longer_texts() -> None:
    assert format_record({"kind": "event", "event": "skipped_update", "step": 3}).startswith("step 3 skipped: ")
    assert format_record({"kind": "event", "event": "bad_record", "substituted": 1}).startswith("1 record ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_for_machines_text_for_people_colour_for_terminals() -> None:
    pipe, terminal = io.StringIO(), Terminal()
    StepLog(pipe).write(RECORD)
    assert json.loads(pipe.getvalue()) == RECORD
    StepLog(terminal).write(RECORD)
    assert "\x1b[36mstep     20\x1b[0m" in terminal.getvalue()
    for mode, stream in (("text", io.StringIO()), ("json", Terminal())):
        StepLog(stream, mode).write(RECORD)  # type: ignore[arg-type]
        assert stream.getvalue().startswith("{") == (mode == "json")
        assert "\x1b" not in stream.getvalue()


def test_a_terminal_without_colours_or_width_gets_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for columns, brief in ((200, False), (70, True)):
        monkeypatch.setenv("COLUMNS", str(columns))
        terminal = Terminal()
        StepLog(terminal).write(RECORD)
        assert "\x1b" not in terminal.getvalue()
        assert ("compute" not in terminal.getvalue()) == brief
        assert "loss 0.5000" in terminal.getvalue()


def test_a_refusal_of_the_fence_is_the_callers(tmp_path: Path) -> None:
    def refuse() -> None:
        raise LeaseLost

    with pytest.raises(LeaseLost):
        EventLog(tmp_path / "m", refuse).event("x")
