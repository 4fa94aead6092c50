"""metrics.jsonl of real runs: restarts that repeat steps, cut lines, text instead of numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from podscale.evaluation.history import MAX_STEP_RECORDS, parse_history, read_history


def step(number: int, time: float, loss: float = 1.0, rate: float = 100.0, **phases: float) -> bytes:
    line: dict[str, Any] = {"time": time, "kind": "step", "step": number, "epoch": number / 10, "loss": loss}
    return json.dumps({**line, "learning_rate": 0.1, "images_per_second": rate, "phases": phases}).encode()


def event(name: str, time: float, **more: Any) -> bytes:
    return json.dumps({"time": time, "kind": "event", "event": name, **more}).encode()


def test_steps_that_were_redone_count_once_but_their_time_counts_twice() -> None:
    history = parse_history(
        [
            event("start", 0),
            step(10, 10, 2.0, data_wait=1),
            step(20, 20, 1.5, data_wait=1),
            step(30, 30, 1.2, data_wait=1),
            event("resumed", 1000),  # from the checkpoint of step 10
            step(20, 1010, 1.4, data_wait=1),
            step(30, 1020, 1.1, data_wait=2),
            event("done", 1025),
        ]
    )
    assert [(line["step"], line["loss"]) for line in history.steps] == [(10, 2.0), (20, 1.4), (30, 1.1)]
    assert history.seconds == 30 + 25
    assert history.phases == {"data_wait": 6.0}
    assert history.count("resumed") == 1


def test_start_and_resumed_together_are_one_launch() -> None:
    history = parse_history([event("start", 0), event("resumed", 4), step(1, 10), event("start", 100), step(2, 103)])
    assert history.seconds == 13


def test_what_a_lost_launch_logged_after_its_last_checkpoint_is_no_history() -> None:
    lines = [event("start", 0, step=0), step(10, 10), step(20, 20), event("resumed", 30, step=10), event("done", 31)]
    assert [line["step"] for line in parse_history(lines).steps] == [10]


def test_the_evaluation_afterwards_is_no_time_of_the_training() -> None:
    lines = [event("start", 0, step=0), step(10, 10), event("done", 11), event("evaluated", 500, images=9, seconds=2.0)]
    history = parse_history(lines)
    assert history.seconds == 11
    assert history.newest("evaluated")["images"] == 9
    assert history.newest("resumed") is None


def test_throughput_is_images_over_seconds_not_a_mean_of_rates() -> None:
    history = parse_history([step(10, 1, rate=100.0), step(20, 2, rate=300.0)])
    # 10 steps of 30 images at 100/s are 3 s, and at 300/s 1 s: 600 images in 4 s.
    assert history.images_per_second() == pytest.approx(150.0)


def test_throughput_counts_the_batches_of_each_step() -> None:
    """10 steps of 30 images at 100/s are 3 s, 5 more 1.5 s, 5 of 120 at 300/s 2 s: 1050 images in 6.5 s."""
    start = event("start", 0, step=0, global_batch=30)
    change = event("batch", 1, step=15, global_batch=120)
    history = parse_history(
        [start, step(10, 1, rate=100.0), step(15, 1.5, rate=100.0), change, step(20, 2, rate=300.0)]
    )
    assert history.images_per_second() == pytest.approx(1050 / 6.5)
    resumed = event("resumed", 5, step=20, global_batch=120)
    again = parse_history(
        [start, step(15, 1, rate=100.0), change, step(20, 2, rate=300.0), resumed, step(21, 6, rate=60.0)]
    )
    assert again.images_per_second() == pytest.approx((450 + 600 + 120) / (4.5 + 2 + 2))


def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(step(1, 1) + b"\n\xff\xfe\n[1, 2]\n" + b'{"kind": "step", "loss": 1}\n' + step(2, 2)[:-7])
    history = read_history(path)
    assert [line["step"] for line in history.steps] == [1]
    assert history.damaged == 4


def test_no_file_is_an_empty_history(tmp_path: Path) -> None:
    history = read_history(tmp_path / "none")
    assert not history
    assert history.images_per_second() is None


def test_a_long_run_is_thinned_and_its_throughput_stays_exact() -> None:
    lines, seconds = [], 0.0
    for n in range(1, 5 * MAX_STEP_RECORDS + 2):
        rate = 100.0 + n % 7
        seconds += 10 * 32 / rate
        lines.append(step(10 * n, n, rate=rate))
    history = parse_history([event("start", 0, step=0), *lines])
    assert MAX_STEP_RECORDS <= len(history.steps) <= 2 * MAX_STEP_RECORDS
    assert history.steps[-1]["step"] == 10 * (5 * MAX_STEP_RECORDS + 1)
    assert history.images_per_second() == pytest.approx(len(lines) * 320 / seconds)
