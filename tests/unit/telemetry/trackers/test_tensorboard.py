"""Event files, read back by TensorBoard itself and by a reader made from the format's definition."""

import io
import json
import math
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podscale.telemetry.events import EventRecord
from podscale.telemetry.trackers.base import LaunchExit
from podscale.telemetry.trackers.tensorboard import EventFile, TensorBoard, crc32c, masked
from tests.support.event_files import events, parsed
from tests.support.run_records import evaluation_record, launch_record, step_record
from tests.support.tensorboard import curves


def track(directory: Path, records: list[EventRecord], *, killed: bool = False) -> None:
    """Run the tracker of one launch; if `killed`, it is not closed."""
    tracker = TensorBoard(directory)
    for record in records:
        tracker.add(record)
    tracker.flush()
    if not killed:
        tracker.close(LaunchExit(0))


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (bytes([0xFF] * 32), 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"", 0),
    ],
)
def test_checksums_of_rfc_3720(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


@given(st.binary(max_size=300))
def test_checksums_equal_those_of_another_library(data: bytes) -> None:
    assert crc32c(data) == google_crc32c.value(data)


def test_masked_checksums_fit_into_their_field() -> None:
    assert masked(0) == 0xA282EAD8
    assert masked(0xFFFFFFFF) == 0xA282EAD7


@given(
    st.integers(0, 2**63 - 1),
    st.floats(0, 1e12),
    st.dictionaries(st.text(max_size=20), st.floats(width=32, allow_nan=False), max_size=5),
)
def test_points_are_read_back_unchanged(step: int, time: float, values: dict[str, float]) -> None:
    written = io.BytesIO()
    EventFile(written, 5.0).scalars(time, step, values)
    head, point = parsed(written.getvalue())
    assert (head.wall_time, head.file_version) == (5.0, "brain.Event:2")
    assert (point.wall_time, point.step) == (time, step)
    assert {value.tag: value.simple_value for value in point.summary.value} == values


def test_values_beyond_float32_are_infinite() -> None:
    written = io.BytesIO()
    EventFile(written, 5.0).scalars(1.0, 1, {"a": 1e300, "b": -1e300, "c": math.nan})
    scalars = {value.tag: value.simple_value for value in parsed(written.getvalue())[1].summary.value}
    assert scalars["a"] == math.inf
    assert scalars["b"] == -math.inf
    assert math.isnan(scalars["c"])


def test_tensorboard_shows_the_metrics_of_a_run(tmp_path: Path) -> None:
    goodput = {"time": 103.0, "kind": "event", "event": "goodput", "goodput": 0.5, "wall_seconds": 60.0, "seconds": {}}
    track(
        tmp_path / "r" / "tensorboard",
        [launch_record(0), step_record(1), step_record(2, None), evaluation_record(2, 0.25), goodput],
    )
    scalars = curves(tmp_path / "r" / "tensorboard")
    assert scalars["train/learning_rate"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.1))]
    assert scalars["train/loss"][0] == (1, 1.0)
    assert math.isnan(scalars["train/loss"][1][1])
    assert scalars["train/epoch"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2))]
    assert scalars["throughput/images_per_second"] == [(1, 1000.0), (2, 1000.0)]
    assert scalars["phases/data_wait"] == [(1, 0.25), (2, 0.25)]
    assert scalars["evaluation/top1"] == [(2, 0.25)]
    assert scalars["goodput/ratio"] == [(2, 0.5)]


def test_repeated_steps_are_shown_once(tmp_path: Path) -> None:
    first = [launch_record(0), *(step_record(step) for step in range(1, 9)), evaluation_record(8, 0.1)]
    again = [launch_record(5), *(step_record(step, 2.0) for step in range(6, 12))]
    track(tmp_path, first, killed=True)
    assert [step for step, _ in curves(tmp_path)["train/loss"]] == list(range(1, 9))
    track(tmp_path, [*first, *again])
    scalars = curves(tmp_path)
    assert scalars["train/loss"] == [*((step, 1.0) for step in range(1, 6)), *((step, 2.0) for step in range(6, 12))]
    assert "evaluation/top1" not in scalars or scalars["evaluation/top1"] == []  # that of a lost step


def test_repeated_steps_within_one_supervisor_are_shown_once(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    for record in (launch_record(0), step_record(1), step_record(2), step_record(3)):
        tracker.add(record)
    tracker.flush()
    for record in (launch_record(1), step_record(2, 2.0)):
        tracker.add(record)
    tracker.close(LaunchExit(0))
    assert curves(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0)]


def test_an_open_reader_gets_no_point_twice(tmp_path: Path) -> None:
    """TensorBoard continues from one file to the next; it may have read a file before that is removed."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    records = [launch_record(0), *(step_record(step) for step in range(1, 6))]
    track(tmp_path, records, killed=True)
    living = reader.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    living.Reload()
    assert len(living.Scalars("train/loss")) == 5
    track(tmp_path, [*records, launch_record(3), step_record(4), step_record(5), step_record(6)])
    living.Reload()
    assert [point.step for point in living.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_a_launch_writes_only_what_is_new(tmp_path: Path) -> None:
    records: list[EventRecord] = [launch_record(0)]
    for step in (1, 2, 3):
        records.append(step_record(step))
        track(tmp_path, records)
    files = [events(path) for path in sorted(tmp_path.iterdir())]
    assert [file[0].file_version for file in files] == ["brain.Event:2"] * 3
    assert [[event.step for event in file[1:]] for file in files] == [[1, 1], [2], [3]]
    assert files[0][1].session_log.status == 1


@pytest.mark.parametrize("left", range(0, 700, 23))
def test_a_writer_that_was_killed_in_the_middle_of_an_event(tmp_path: Path, left: int) -> None:
    records = [launch_record(0), step_record(1), evaluation_record(1, 0.1), step_record(2)]
    track(tmp_path, records, killed=True)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:left])
    track(tmp_path, [*records, step_record(3)])
    scalars = curves(tmp_path)
    assert scalars["train/loss"] == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert scalars["evaluation/top1"] == [(1, pytest.approx(0.1))]


def test_a_clock_that_went_backwards(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.9999999998.host.1.podscale").write_bytes(b"")
    track(tmp_path, [launch_record(0), step_record(1)])
    assert sorted(path.name.split(".")[3] for path in tmp_path.iterdir()) == ["9999999998", "9999999999"]


def test_a_launch_exit_is_one_line() -> None:
    ended = LaunchExit(75, "stopped\non request")
    assert ended.to_line().count(b"\n") == 1
    assert LaunchExit.parse(ended.to_line()) == ended
    assert LaunchExit.parse(b"").exit_code == 1
    assert json.loads(ended.to_line())["exit_code"] == 75
