"""`podscale run` with the JAX engine, two processes: killed and stopped in the middle of training, and started again
with the same command each time. The end is the same bits, and nothing that another run compiled is compiled again."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from podscale.errors import ExitCode
from podscale.runs import predictions
from podscale.telemetry.events import read_records
from tests.support.commands import SMALL_DIGITS, Command, different, podscale, programs, result
from tests.support.xla import QUICK_XLA

Start = Callable[..., Command]
JAX = ("--set", "train.engine=jax", "--set", "launch.processes=2")
IMAGES = 359
"""Of the validation split: the processes have 180 each, and one of them one less."""
QUICK = {"XLA_FLAGS": QUICK_XLA}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A workspace with run.yaml: 45 steps."""
    (tmp_path / "run.yaml").write_text(SMALL_DIGITS.replace("epochs: 3", "epochs: 2"))
    return tmp_path


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    started: list[Command] = []

    def begin() -> Command:
        """Starts the command and returns in the middle of training, between two checkpoints."""
        started.append(Command(place, "run", "run.yaml", *JAX, variables=QUICK))
        started[-1].wait_for_updates(place / "runs" / "small", 8)
        return started[-1]

    yield begin
    for command in started:
        command.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_and_stopped_ends_as_the_calm_one(start: Start, place: Path) -> None:
    run, calm = place / "runs" / "small", place / "runs" / "calm"
    ended = podscale(place, "run", "run.yaml", *JAX, "--set", "run.id=calm", variables=QUICK)
    assert ended.code == ExitCode.DONE, ended.err
    compiled = programs(place)
    assert len([name for name in compiled if name.startswith("jit_run_steps-")]) == 1

    command = start()
    os.kill(command.ranks()[1], signal.SIGKILL)
    ended = command.end()
    assert ended.code == ExitCode.PEER_LOST, ended.err
    assert "rank 1" in ended.last

    command = start()
    os.killpg(command.process.pid, signal.SIGTERM)
    ended = command.end()
    assert ended.code == ExitCode.PREEMPTED, ended.err
    assert "the state is saved" in ended.last
    ended = podscale(place, "run", "run.yaml", *JAX, variables=QUICK)
    assert ended.code == ExitCode.DONE, ended.err
    assert different(result(run), result(calm)) == []
    events = [line["event"] for line in read_records(run / "metrics.jsonl") if line["kind"] == "event"]
    assert (events.count("start"), events.count("resumed"), events.count("preempted")) == (1, 2, 1)
    assert (run / "predictions.safetensors").read_bytes() == (calm / "predictions.safetensors").read_bytes()
    kept = programs(place)
    assert {name: kept[name] for name in compiled} == compiled
    assert len([name for name in kept if name.startswith("jit_run_steps-")]) == 1
    check_that_the_other_engine_says_the_same_of_the_model(place, run)


def check_that_the_other_engine_says_the_same_of_the_model(place: Path, run: Path) -> None:
    """On one process instead of two, whose evaluations have counted every image once."""
    found = predictions.read_predictions(run / "predictions.safetensors")
    evaluations = [line for line in read_records(run / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert len(found) == len(np.unique(found.keys)) == IMAGES
    assert (evaluations[-1]["top1"], evaluations[-1]["top5"]) == found.top1_top5_accuracy()
    ended = podscale(place, "evaluate", "run.yaml", "--set", "launch.processes=1", "--set", "train.engine=pytorch")
    assert ended.code == ExitCode.DONE, ended.err
    wanted = predictions.read_predictions(run / "predictions.safetensors")
    np.testing.assert_array_equal(found.keys, wanted.keys)
    np.testing.assert_array_equal(found.labels, wanted.labels)
    np.testing.assert_allclose(found.losses, wanted.losses, atol=1e-4)
    assert (found.topk[:, 0] == wanted.topk[:, 0]).mean() > 0.99
