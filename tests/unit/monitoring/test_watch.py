"""`podscale watch`: status from records and metrics, and the screen; the runs are made of files."""

import fcntl
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from podscale.cli import main
from podscale.config.telemetry import TelemetrySection
from podscale.monitoring.watch.run_status import RunStatus, read_run_stats
from podscale.monitoring.watch.view import MAX_RANKS, ScreenFrame, render_frame, sparkline
from podscale.telemetry.endpoint import Endpoint
from podscale.telemetry.events import EventLog, EventRecord
from podscale.telemetry.goodput import goodput_fraction
from podscale.telemetry.pod_telemetry import StageTelemetry
from podscale.telemetry.server import MetricsServer
from tests.support.outcomes import assert_error

PHASES = {"data_wait": 1.0, "forward_backward": 6.0, "allreduce_wait": 3.0, "evaluation": 50.0}


def exposition(images: dict[int, float], *, data_wait: float = 2.0) -> str:
    """Return the exposition of ranks, with `images` of each in 10 seconds of steps."""
    lines = []
    for rank, number in images.items():
        labels = f'run="r",rank="{rank}"'
        lines += [
            f"podscale_train_images_total{{{labels}}} {number}",
            f"podscale_train_step_duration_seconds_sum{{{labels}}} 10",
            f'podscale_train_phase_seconds_total{{{labels},phase="data_wait"}} {data_wait}',
            f'podscale_train_phase_seconds_total{{{labels},phase="forward_backward"}} 8',
            f'podscale_train_memory_bytes{{{labels},kind="resident"}} 1048576',
            f"podscale_train_data_queue_depth{{{labels}}} 3",
            f'podscale_train_samples_skipped_total{{{labels},reason="decode"}} 1',
        ]
    lines += [
        'podscale_train_wall_seconds_total{run="r",rank="0",state="productive"} 75',
        'podscale_train_wall_seconds_total{run="r",rank="0",state="redo"} 25',
    ]
    return "\n".join(lines) + "\n"


def a_run(directory: Path, *, steps: int = 3) -> Path:
    """Make the run directory of a training after `steps` of 10 steps."""
    directory.mkdir(parents=True)
    with EventLog(directory / "metrics.jsonl") as log:
        log.event("start", step=0, total_steps=10, ranks=2, global_batch=64, device="cpu")
        for step in range(1, steps + 1):
            log.step(
                step, epoch=step / 5, loss=2.0 / step, learning_rate=0.1, images_per_second=100.0 * step, phases=PHASES
            )
        log.evaluation(steps, epoch=steps / 5, top1=0.5, top5=0.9, loss=1.0)
        log.event("checkpoint", step=steps, bytes=100, seconds=0.1)
    return directory


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold the run directory as a launch does."""
    descriptor = os.open(directory / ".lease", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def serving(directory: Path, text: str) -> Iterator[None]:
    server = MetricsServer("127.0.0.1", 0, text.encode).start()
    (directory / "metrics.url").write_text(server.url)
    try:
        yield
    finally:
        server.close()


def watched(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["watch", *arguments, "--once", "--json"]) == 0
    status: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status


def status_of(*records: EventRecord) -> RunStatus:
    status = RunStatus()
    for number, record in enumerate(records):
        status.add_record({"time": 100.0 + number, **record})
    return status


def drawn(frame: ScreenFrame, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render_frame(frame, now=200.0))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


START = {"kind": "event", "event": "start", "step": 0, "total_steps": 10, "ranks": 2, "device": "cpu"}
STEP = {
    "kind": "step", "step": 4, "epoch": 0.5, "loss": 1.5, "learning_rate": 0.1, "images_per_second": 250.0,
    "phases": PHASES, "slowest": {"rank": 1, "milliseconds": 70},
}  # fmt: skip


def test_records_give_the_status() -> None:
    status = status_of(START, STEP)
    assert (status.state, status.step, status.total_steps, status.images_per_second) == ("training", 4, 10, 250.0)
    assert status.phases == {"data_wait": 0.1, "forward_backward": 0.6, "allreduce_wait": 0.3}
    assert status.seconds_left == pytest.approx(1.5)  # 4 steps took one second


def test_a_resumed_run_goes_back_and_counts_its_launches() -> None:
    status = status_of(START, STEP, {**START, "event": "resumed", "step": 2})
    assert (status.launches, status.step, status.seconds_left) == (2, 2, None)


def test_the_best_accuracy_outlasts_a_worse_one() -> None:
    evaluation = {"kind": "evaluation", "step": 5, "epoch": 1.0, "top1": 0.8, "top5": 0.9, "loss": 1.0}
    status = status_of(START, evaluation, {**evaluation, "step": 6, "top1": 0.7})
    assert (status.evaluation["top1"], status.best_top1) == (0.7, 0.8)  # type: ignore[index]


@pytest.mark.parametrize(
    ("event", "state"), [("preempted", "stopped"), ("done", "trained"), ("evaluated", "evaluated")]
)
def test_the_status_of_a_finished_training(event: str, state: str) -> None:
    end = {"kind": "event", "event": event, "step": 4, "images": 10, "seconds": 1.0, "processes": 2}
    status = status_of(START, STEP, end)
    assert status.state == state
    assert status.images_per_second is None  # no training any more


def test_goodput_is_known_after_the_metrics_endpoint_is_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "runs" / "r")
    with EventLog(run / "metrics.jsonl") as log:
        log.event("goodput", goodput=0.8, seconds={"productive": 8.0, "init": 2.0})
    assert watched(capsys, str(run))["goodput"]["ratio"] == 0.8


def test_metrics_give_the_values_of_each_rank() -> None:
    status = read_run_stats({"pod-a": exposition({0: 400.0}), "pod-b": exposition({1: 200.0})})
    assert [status.ranks[rank].images_per_second for rank in (0, 1)] == [40.0, 20.0]
    assert status.ranks[1].pod == "pod-b"
    assert (status.ranks[0].memory_bytes, status.ranks[0].queued_batches, status.ranks[0].bad_records) == (2**20, 3, 1)
    assert goodput_fraction(status.wall_seconds) == 0.75


def test_the_headline_says_why_a_running_run_has_no_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The token differs from the one that the endpoint was started with."""
    run = a_run(tmp_path / "runs" / "r")
    for token in ("first", "second"):
        (tmp_path / token).write_text(token)
    section = TelemetrySection(bearer_token_file=str(tmp_path / "first"))
    with held(run), StageTelemetry(section, run="r", stage="train", volumes={}) as served:
        served.start(run / "metrics.url")
        assert watched(capsys, str(run))["headline"] == ""
        Endpoint(served.url or "", token_file=tmp_path / "second").write(run / "metrics.url")
        headline = watched(capsys, str(run))["headline"]
    assert f" {served.url}: " in headline
    assert headline.endswith("(got 401)")


def test_values_of_an_interval_are_differences_of_two_scrapes() -> None:
    before = read_run_stats({"": exposition({0: 400.0})})
    now = read_run_stats({"": exposition({0: 900.0}, data_wait=5.0)})
    since = now.ranks[0].since(before.ranks[0])
    assert (since.images, since.phases["data_wait"]) == (500.0, 3.0)
    assert before.ranks[0].since(now.ranks[0]) is before.ranks[0]  # the counters restarted


@pytest.mark.parametrize("text", ["", "not metrics {", 'podscale_train_images_total{rank="x"} 1\n'])
def test_text_that_is_no_exposition_gives_no_values(text: str) -> None:
    status = read_run_stats({"": text})
    assert (status.ranks, goodput_fraction(status.wall_seconds)) == ({}, None)


def test_the_screen_shows_status_and_ranks() -> None:
    stats = read_run_stats({"": exposition({0: 400.0, 1: 200.0})})
    ranks, status = list(stats.ranks.values()), status_of(START, STEP)
    text = drawn(ScreenFrame("runs/r", "PyTorchJob runs", status, ranks, stats.wall_seconds))
    for words in ("step 4 of 10", "250", "75%", "redo 25%", "rank 1, 70 ms", "data wait 10%", "2 processes (cpu)"):
        assert words in text
    assert "PyTorchJob runs" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["│", "0", "40", "80%", "20%", "-", "3", "1.0", "MiB", "│"] in rows


def test_the_screen_of_a_run_that_has_not_started_and_on_a_narrow_terminal() -> None:
    assert "waiting" in drawn(ScreenFrame("runs/r", "", RunStatus(), [], {}), width=30)
    narrow = drawn(ScreenFrame("runs/r", "x" * 200, status_of(START, STEP), [], {}), width=40)
    assert max(len(line) for line in narrow.splitlines()) <= 40


def test_only_some_of_many_ranks_are_shown() -> None:
    stats = read_run_stats({"": "".join(exposition({rank: 100.0 + rank}) for rank in range(64))})
    text = drawn(ScreenFrame("r", "", status_of(START, STEP), list(stats.ranks.values()), {}))
    assert f"and {64 - MAX_RANKS} between" in text


@pytest.mark.parametrize(("values", "line"), [([], ""), ([0.0], ""), ([1.0, 8.0, 4.0], "▂█▅")])
def test_sparklines(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_once_shows_a_run_directory_and_its_endpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "runs" / "r")
    with held(run), serving(run, exposition({0: 400.0, 1: 200.0})):
        status = watched(capsys, str(run))
        assert (status["step"], status["images_per_second"], status["best_top1"]) == (3, 300.0, 0.5)
        assert [rank["images_per_second"] for rank in status["rank_figures"]] == [40.0, 20.0]
        assert status["goodput"]["ratio"] == 0.75
        assert status["headline"] == ""
        assert main(["watch", str(run), "--once"]) == 0
        assert "step 3 of 10" in capsys.readouterr().out


def test_the_newest_run_of_the_folder_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = a_run(tmp_path / "runs" / "old"), a_run(tmp_path / "runs" / "new")
    os.utime(old / "metrics.jsonl", (1, 1))
    assert watched(capsys)["run"] == "runs/new"
    assert watched(capsys, "old")["run"] == "runs/old"
    assert new.is_dir()


def test_a_run_without_a_writer_is_followed_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "runs" / "r")
    assert main(["watch", str(run)]) == 0  # in a pipe: the lines of the log
    assert "evaluation  step 3" in capsys.readouterr().out
    assert main(["watch", str(run), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    status = json.loads(line)
    assert status["step"] == 3
    assert "exit code" not in status["headline"]


@pytest.mark.parametrize(
    ("arguments", "field", "says"),
    [([], "./runs", []), (["nowhere"], "run nowhere", ["runs/nowhere", "KUBECONFIG"]), (["."], ".", ["metrics.jsonl"])],
)
def test_runs_that_cannot_be_watched_are_refused(
    arguments: list[str],
    field: str,
    says: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert_error(main(["watch", *arguments]), capsys.readouterr().err, *says, field=field)


def test_the_picture_in_the_docs_is_of_this_screen_and_fetches_nothing() -> None:
    """After a change of the screen: python tools/watch_picture.py."""
    committed = (Path(__file__).parents[3] / "docs" / "images" / "watch.svg").read_text(encoding="utf-8")
    words = set(re.sub("<[^>]*>", " ", committed).replace("&#160;", " ").split())
    assert {"images/s", "goodput", "checkpoint", "slowest", "compute", "data", "waits", "queue", "memory"} <= words
    assert "url(http" not in committed.replace('"', "")
    assert "@font-face" not in committed
