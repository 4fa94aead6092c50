"""`podscale train` with the JAX engine: a rank is killed, the run resumes from its checkpoint, and stops on request."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.errors import ExitCode
from podscale.telemetry.events import read_records
from tests.support.commands import SMALL_DIGITS, Command, podscale, programs, set_options
from tests.support.xla import QUICK_XLA

JAX = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_XLA}
CHANGES = ("train.engine=jax", "launch.max_restarts=1", "launch.timeout_seconds=120", "train.epochs=100")


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    (tmp_path / "run.yaml").write_text(SMALL_DIGITS)
    assert podscale(tmp_path, "shard", "run.yaml").code == 0
    started = Command(tmp_path, "train", "run.yaml", *set_options(*CHANGES), variables=JAX)
    yield started
    started.kill()


@pytest.mark.slow
def test_a_killed_rank_comes_back_and_a_request_to_stop_saves(command: Command, tmp_path: Path) -> None:
    """Kill rank 0, and with it JAX's own service and the step log. Its successor compiles nothing again.

    Then only the other rank gets a stop request, as if its host is preempted: both stop after the same step.
    """
    run = tmp_path / "runs" / "small"
    command.wait_for_steps(run, 7)
    compiled = programs(tmp_path)
    assert compiled
    os.kill(first := command.ranks()[0], signal.SIGKILL)

    def resumed() -> list[int]:
        return [line["step"] for line in read_records(run / "metrics.jsonl") if line.get("event") == "resumed"]

    command.wait_for(resumed)
    command.wait_for_steps(run, 12)
    os.kill(command.ranks()[1], signal.SIGTERM)
    ended = command.end()
    assert ended.code == ExitCode.PREEMPTED, ended.err
    events = [line for line in read_records(run / "metrics.jsonl") if line["kind"] == "event"]
    (restart,) = [line for line in events if line["event"] == "restart"]
    assert restart["cause"] == "lost_rank"
    assert re.search(rf"rank 0 \(process {first}\)\D*SIGKILL", restart["error"])
    assert re.search(r"rank 1 of 2\b", restart["error"])
    written = programs(tmp_path)
    assert {name: written[name] for name in compiled} == compiled
    assert len([name for name in written if name.startswith("jit_run_steps-")]) == 1
    (at,) = resumed()
    assert at % 5 == 0
    assert at >= 5
    assert events[-1]["event"] == "preempted"
    assert re.search(rf"podscale: .*\b{events[-1]['step']}\b", ended.err)
