"""`podscale run` with the JAX engine on two processes: killed and stopped during training, resumed by the same command.

The results are bitwise equal to those of an undisturbed run, and programs that another run compiled are not compiled
again.
"""

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
"""Images of the validation split: 180 per process, and one less on one of them."""
QUICK = {"XLA_FLAGS": QUICK_XLA}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Workspace with run.yaml: 45 steps."""
    (tmp_path / "run.yaml").write_text(SMALL_DIGITS.replace("epochs: 3", "epochs: 2"))
    return tmp_path


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    started: list[Command] = []

    def begin() -> Command:
        """Start the command and return during training, between two checkpoints."""
        started.append(Command(directory, "run", "run.yaml", *JAX, variables=QUICK))
        started[-1].wait_for_steps(directory / "runs" / "small", 8)
        return started[-1]

    yield begin
    for command in started:
        command.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_and_stopped_ends_as_the_calm_one(start: Start, directory: Path) -> None:
    run, calm = directory / "runs" / "small", directory / "runs" / "calm"
    ended = podscale(directory, "run", "run.yaml", *JAX, "--set", "run.id=calm", variables=QUICK)
    assert ended.code == ExitCode.DONE, ended.err
    compiled = programs(directory)
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
    ended = podscale(directory, "run", "run.yaml", *JAX, variables=QUICK)
    assert ended.code == ExitCode.DONE, ended.err
    assert different(result(run), result(calm)) == []
    events = [line["event"] for line in read_records(run / "metrics.jsonl") if line["kind"] == "event"]
    assert (events.count("start"), events.count("resumed"), events.count("preempted")) == (1, 2, 1)
    assert (run / "predictions.safetensors").read_bytes() == (calm / "predictions.safetensors").read_bytes()
    written = programs(directory)
    assert {name: written[name] for name in compiled} == compiled
    assert len([name for name in written if name.startswith("jit_run_steps-")]) == 1
    check_that_the_other_engine_says_the_same_of_the_model(directory, run)


def check_that_the_other_engine_says_the_same_of_the_model(directory: Path, run: Path) -> None:
    """Check that the PyTorch engine, on one process instead of two, gets the same scores; each image counts once."""
    by_jax = predictions.read_predictions(run / "predictions.safetensors")
    evaluations = [line for line in read_records(run / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert len(by_jax) == len(np.unique(by_jax.keys)) == IMAGES
    assert (evaluations[-1]["top1"], evaluations[-1]["top5"]) == by_jax.top1_top5_accuracy()
    ended = podscale(directory, "evaluate", "run.yaml", "--set", "launch.processes=1", "--set", "train.engine=pytorch")
    assert ended.code == ExitCode.DONE, ended.err
    by_pytorch = predictions.read_predictions(run / "predictions.safetensors")
    np.testing.assert_array_equal(by_jax.keys, by_pytorch.keys)
    np.testing.assert_array_equal(by_jax.labels, by_pytorch.labels)
    np.testing.assert_allclose(by_jax.losses, by_pytorch.losses, atol=1e-4)
    assert (by_jax.topk[:, 0] == by_pytorch.topk[:, 0]).mean() > 0.99
