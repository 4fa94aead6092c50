"""`podscale run` killed and stopped during training, and resumed by the same command each time.

The results are bitwise equal to those of an undisturbed run, no process keeps running, and no partial file is visible.
"""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from podscale.errors import ExitCode
from podscale.runs.checkpoint.format import complete_entries, read_snapshot
from tests.support.commands import Command, Ended, different, podscale, result
from tests.support.outcomes import reused_stages
from tests.support.ports import free_port

Start = Callable[..., Command]


@pytest.fixture
def start(calm: Path) -> Iterator[Start]:
    started: list[Command] = []
    scrapers: list[socket.socket] = []

    def begin() -> Command:
        """Start the command and return during training, between two checkpoints.

        One scraper hangs in the middle of its request, and one is gone before the answer.
        """
        port = free_port()
        started.append(Command(calm, "run", "run.yaml", "--set", f"telemetry.port={port}"))
        started[-1].wait_for_steps(calm / "runs" / "small", 2)
        for request in (b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n"):
            scrapers.append(socket.create_connection(("127.0.0.1", port)))
            scrapers[-1].sendall(request)
        scrapers[-1].close()
        started[-1].wait_for_steps(calm / "runs" / "small", 8)
        return started[-1]

    yield begin
    for command in started:
        command.kill()
    for scraper in scrapers:
        scraper.close()


def assert_whole(run: Path) -> None:
    """Check that every file with its final name can be read to the end."""
    for path in run.glob("*.json"):
        json.loads(path.read_text())
    for path in run.glob("model/*.safetensors"):
        with safe_open(path, "numpy") as file:
            assert list(file.keys())
    entries = complete_entries(run / "checkpoints")
    assert entries
    for entry in entries:
        read_snapshot(entry)  # checks the hashes


@pytest.mark.slow
def test_a_run_that_is_killed_and_stopped_ends_as_the_calm_one(start: Start, calm: Path) -> None:
    run = calm / "runs" / "small"

    def end(command: Command) -> Ended:
        ended = command.end()
        assert_whole(run)
        return ended

    command = start()
    rank = command.ranks()[1]
    os.kill(rank, signal.SIGSTOP)  # a second launch meanwhile
    before = {path: path.read_bytes() for path in run.iterdir() if path.suffix in (".json", ".yaml", ".log")}
    second = podscale(calm, "run", "run.yaml")
    assert second.code == ExitCode.BAD_INPUT
    assert f"process {command.process.pid}" in second.last
    for path, content in before.items():
        assert path.read_bytes().startswith(content), f"{path} was written by the second launch"
    os.kill(rank, signal.SIGKILL)
    ended = end(command)
    assert ended.code == ExitCode.PEER_LOST, ended.err
    assert "rank 1" in ended.last

    command = start()
    os.kill(command.stage(), signal.SIGKILL)
    ended = end(command)
    assert ended.code == ExitCode.FAILED, ended.err

    command = start()
    command.process.kill()
    end(command)

    command = start()
    os.killpg(command.process.pid, signal.SIGTERM)  # to every process, as `timeout` and a service manager send it
    ended = end(command)
    assert ended.code == ExitCode.PREEMPTED, ended.err

    ended = podscale(calm, "run", "run.yaml")
    assert ended.code == ExitCode.DONE, ended.err
    assert "shard" in reused_stages(ended.err)
    assert different(result(run), result(calm / "runs" / "calm")) == []
    assert not [path for path in run.rglob("*") if path.name.endswith((".tmp", ".part"))]
    log = (run / "metrics.jsonl").read_text()
    assert log.count('"event": "resumed"') == 4
    assert log.count('"event": "start"') == 1
