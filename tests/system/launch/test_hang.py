"""A rank whose main thread sleeps for ever in its loader: it is detected and named, and every rank dumps its stack."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.errors import ExitCode
from podscale.telemetry.goodput import read_goodput_state
from tests.support.commands import Command, set_options

FAULT_INJECTION = Path(__file__).parents[1] / "fault_injection"
STUCK_AT = 30
LIMIT = 10


@pytest.fixture
def stuck(calm: Path) -> Iterator[Command]:
    settings = set_options("run.id=stuck", f"launch.hang_seconds={LIMIT}")
    variables = {"PYTHONPATH": str(FAULT_INJECTION), "INJECTED_FAULT": f"stuck:1:{STUCK_AT}"}
    command = Command(calm, "train", "run.yaml", *settings, variables=variables)
    yield command
    command.kill()


@pytest.mark.slow
def test_a_rank_that_sleeps_in_its_loader_is_named(stuck: Command, calm: Path) -> None:
    run = calm / "runs" / "stuck"
    stuck.wait_for_steps(run, 20)
    sleeper = stuck.ranks()[1]
    with urllib.request.urlopen((run / "metrics.url").read_text().strip(), timeout=30) as answer:
        limits = re.findall(r'train_hang_limit_seconds\{rank="(\d)",run="stuck"\} (\S+)', answer.read().decode())
    assert [rank for rank, _ in limits] == ["0", "1"]
    assert min(float(seconds) for _, seconds in limits) >= LIMIT
    ended = stuck.end()
    assert ended.code == ExitCode.HANG, ended.err
    message = ended.err[ended.err.rindex("podscale: ") :]
    assert re.search(rf"rank 1\b.*\(process {sleeper} on ", message)
    assert re.search(rf"in data_wait of \w+ {STUCK_AT + 1}\b", message)
    stacks = {rank: (run / "hang" / f"rank-{rank}.txt").read_text() for rank in (0, 1)}
    assert "sitecustomize.py" in stacks[1]  # where it sleeps
    assert "sitecustomize.py" not in stacks[0]
    assert "reducer.py" in stacks[0]  # where it waits
    recorded = json.loads((run / "hang" / "rank-0.flight.json").read_text())
    assert recorded["gloo"]["entries"]
    book = read_goodput_state(run / ".heartbeat")
    assert book is not None
    assert book.exit_cause == "hang"
