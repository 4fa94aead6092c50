"""Trackers of a training: their effect if they fail, hang or are removed; a real training, killed and resumed."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.errors import ExitCode
from podscale.runs.checkpoint.format import complete_entries
from podscale.telemetry.events import filter_replays, newest_step, read_records
from tests.support.commands import SMALL_DIGITS, Command, cmdline, podscale, set_options
from tests.support.supervised import Launch, Run
from tests.support.tensorboard import curves

TENSORBOARD = "telemetry.trackers=[tensorboard]"


def failures(run: Run) -> list[tuple[str, str]]:
    """Return the trackers that failed according to the run's log, with the reasons."""
    records = read_records(run.run_directory / "metrics.jsonl")
    return [(line["tracker"], line["reason"]) for line in records if line.get("event") == "tracker_failed"]


def trackers(run: Run) -> list[int]:
    """Return the process ids of the trackers."""
    return [pid for pid in run.members() if "podscale.telemetry.trackers" in cmdline(pid)]


def unusable(tmp_path: Path) -> Path:
    """Put a file at the path of the directory of event files."""
    path = tmp_path / "runs" / "t" / "tensorboard"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_tensorboard_has_every_step_of_a_run(launch: Launch) -> None:
    run = launch(TENSORBOARD, all="train")
    code, _, err = run.end()
    assert code == 0, err
    assert f"tensorboard: {run.run_directory}/tensorboard" in err
    assert [step for step, _ in curves(run.run_directory / "tensorboard")["train/loss"]] == [1, 2, 3, 4, 5]
    assert failures(run) == []
    assert run.members() == []


def test_no_tracker_starts_by_default(launch: Launch) -> None:
    run = launch(all="train")
    assert run.end()[0] == 0
    assert not list((run.run_directory / "logs").glob("tracker-*"))
    assert not (run.run_directory / "tensorboard").exists()


def test_a_tracker_that_fails_is_one_warning(launch: Launch, tmp_path: Path) -> None:
    unusable(tmp_path)
    run = launch(TENSORBOARD, all="train")
    code, out, err = run.end()
    assert code == 0, err
    ((name, why),) = failures(run)
    assert name == "tensorboard"
    assert why.startswith("FileExistsError: ")
    assert "Traceback" in (run.run_directory / "logs" / "tracker-tensorboard.log").read_text()
    assert '"tracker_failed"' in out


def test_a_failure_of_a_required_tracker_ends_the_run(launch: Launch, tmp_path: Path) -> None:
    unusable(tmp_path)
    run = launch(TENSORBOARD, "telemetry.required=true", all="long")
    code, _, err = run.end()
    assert code == ExitCode.FAILED
    (line,) = [line for line in err.splitlines() if line.startswith("error: telemetry.trackers: ")]
    for text in ("tensorboard", "FileExistsError: ", "telemetry.required=false"):
        assert text in line
    outcome = run.outcome()
    assert outcome["exit_code"] == ExitCode.FAILED
    assert run.members() == []


def test_a_tracker_that_hangs_does_not_hold_up_a_stop(launch: Launch) -> None:
    run = launch(TENSORBOARD, all="long")
    run.wait_for(lambda: (run.run_directory / "tensorboard").exists() and bool(trackers(run)))
    for pid in trackers(run):
        os.kill(pid, signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == ExitCode.PREEMPTED, err
    assert failures(run) == [("tensorboard", "it did not finish in time; its last values may be missing")]
    assert run.members() == []


def test_a_tracker_that_is_killed_does_not_affect_the_others(launch: Launch) -> None:
    run = launch(TENSORBOARD, all="hundred")
    run.wait_for(lambda: (run.run_directory / "tensorboard").exists() and bool(trackers(run)))
    for pid in trackers(run):
        os.kill(pid, signal.SIGKILL)
    code, _, err = run.end()
    assert code == 0, err
    ((name, why),) = failures(run)
    assert name == "tensorboard"
    assert " -9" in why


def test_trackers_exit_with_their_supervisor(launch: Launch) -> None:
    run = launch(TENSORBOARD, all="long")
    run.wait_for(lambda: bool(trackers(run)))
    run.process.kill()
    deadline = time.monotonic() + 60
    while run.members() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert run.members() == []


def test_one_tracker_process_follows_a_run_over_its_restarts(launch: Launch) -> None:
    run = launch(TENSORBOARD, "launch.max_restarts=1", all="killed_once")
    code, _, err = run.end()
    assert code == 0, err
    assert [step for step, _ in curves(run.run_directory / "tensorboard")["train/loss"]] == [1, 2, 3, 4, 5]
    assert len(list((run.run_directory / "tensorboard").iterdir())) == 1


def test_statuses_go_to_the_address_of_kubeflow_trainer(launch: Launch, tmp_path: Path) -> None:
    """The run continues, although no server answers at this address. Unit tests check the statuses."""
    (tmp_path / "token").write_text("t")
    variables = {
        "KUBEFLOW_TRAINER_SERVER_URL": "https://127.0.0.1:9/status",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/no/such/ca.crt",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }
    run = launch("telemetry.required=true", all="train", variables=variables)
    code, _, err = run.end()
    assert code == 0, err
    assert "trainjob: https://127.0.0.1:9/status" in err
    assert err.count("cannot send the status of the TrainJob") == 1
    assert failures(run) == []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        command.kill()


def halted_after_a_checkpoint(command: Command, run: Path) -> bool:
    """Stop the rank, and keep it stopped if its log has steps after the newest checkpoint; else let it continue."""
    rank = command.ranks()[0]
    os.kill(rank, signal.SIGSTOP)
    newest = max((entry.step for entry in complete_entries(run / "checkpoints")), default=0)
    if newest_step(run / "metrics.jsonl") > newest:
        return True
    os.kill(rank, signal.SIGCONT)
    return False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_that_is_killed_and_continued(tmp_path: Path, start: list[Command]) -> None:
    (tmp_path / "run.yaml").write_text(SMALL_DIGITS)
    run, options = tmp_path / "runs" / "small", [TENSORBOARD, "evaluate.every_epochs=1", "launch.processes=1"]
    train = ["train", "run.yaml", *set_options(*options)]
    assert podscale(tmp_path, "shard", "run.yaml").code == 0
    start.append(Command(tmp_path, *train))
    start[-1].wait_for(lambda: (run / "tensorboard").exists())
    start[-1].wait_for_steps(run, 8)
    start[-1].wait_for(lambda: halted_after_a_checkpoint(start[-1], run))
    start[-1].process.kill()
    start[-1].end()
    assert not (run / "model").exists(), "the training ended before it could be killed"
    ended = podscale(tmp_path, *train)
    assert ended.code == 0, ended.err
    lines = list(read_records(run / "metrics.jsonl"))
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert len(steps) > len(set(steps)), "no step was repeated"
    calm = filter_replays(lines)
    scalars = curves(run / "tensorboard")
    for tag, kind, name in (
        ("train/loss", "step", "loss"),
        ("train/learning_rate", "step", "learning_rate"),
        ("train/epoch", "step", "epoch"),
        ("throughput/images_per_second", "step", "images_per_second"),
        ("evaluation/top1", "evaluation", "top1"),
        ("evaluation/top5", "evaluation", "top5"),
        ("evaluation/loss", "evaluation", "loss"),
    ):
        expected = [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in calm if line["kind"] == kind]
        assert scalars[tag] == expected, tag
    assert len(scalars["evaluation/top1"]) == 3
    assert {"phases/data_wait", "phases/forward_backward", "goodput/ratio"} <= scalars.keys()
    assert json.loads((run / "outcome.json").read_text())["train"]["exit_code"] == 0
