"""A rank with a slow loader is named, with its host, in the log and in the metrics."""

import json
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.errors import ExitCode
from podscale.telemetry.events import EventRecord, read_records
from tests.support.commands import Command, set_options

FAULT_INJECTION = Path(__file__).parents[1] / "fault_injection"


@pytest.fixture
def slowed(calm: Path) -> Iterator[Command]:
    settings = set_options("run.id=straggler", "train.epochs=500", "checkpoint.every_steps=0")
    variables = {"PYTHONPATH": str(FAULT_INJECTION), "INJECTED_FAULT": "slow:1"}
    command = Command(calm, "train", "run.yaml", *settings, variables=variables)
    yield command
    command.kill()


def test_a_slow_rank_is_named(slowed: Command, calm: Path) -> None:
    run = calm / "runs" / "straggler"

    def named() -> list[EventRecord]:
        return [r for r in read_records(run / "metrics.jsonl") if r.get("event") == "straggler"]

    slowed.wait_for(named)
    (event,) = named()
    assert (event["rank"], event["host"]) == (1, socket.gethostname()), json.dumps(event)
    assert event["ratio"] >= 1.25

    def series() -> str:
        with urllib.request.urlopen((run / "metrics.url").read_text().strip(), timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    slowed.wait_for(lambda: re.search(r'^podscale_train_straggler_rank\{rank="0",run="straggler"\} 1', series(), re.M))
    busy = {rank: float(value) for rank, value in re.findall(r'busy_seconds_total\{rank="(\d)",.*\} (\S+)', series())}
    assert busy["1"] > busy["0"] > 0
    slowed.process.send_signal(signal.SIGTERM)
    ended = slowed.end()
    assert ended.code == ExitCode.PREEMPTED, ended.err
