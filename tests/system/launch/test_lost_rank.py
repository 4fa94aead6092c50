"""`podscale train` with a rank that is killed or stopped, and pods with different documents: exit code and message.

The command leaves nothing in the temporary directory.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podscale.errors import ExitCode
from tests.support.commands import Command, Ended, set_options

Start = Callable[..., Command]


@pytest.fixture
def start(calm: Path) -> Iterator[Start]:
    started: list[Command] = []

    def begin(run: str, *changes: str, variables: dict[str, str] | None = None) -> Command:
        settings = set_options(f"run.id={run}", *changes)
        started.append(Command(calm, "train", "run.yaml", *settings, variables=variables))
        return started[-1]

    yield begin
    for command in started:
        command.kill()


@pytest.mark.parametrize(
    ("number", "rank", "code", "expected"),
    [
        (signal.SIGSTOP, 1, ExitCode.HANG, r"rank 1\D*\(process {pid}\b"),
        (signal.SIGKILL, 0, ExitCode.PEER_LOST, r"rank 0 \(process {pid}\)\D*SIGKILL \(rank 1 of 2"),
    ],
)
def test_a_rank_is_lost_in_training(
    start: Start, calm: Path, tmp_path: Path, number: signal.Signals, rank: int, code: ExitCode, expected: str
) -> None:
    run = f"lost-{number.name.lower()}-{rank}"
    command = start(run, "launch.timeout_seconds=5", "train.epochs=100", variables={"TMPDIR": str(tmp_path)})
    command.wait_for_steps(calm / "runs" / run, 5)
    pid = command.ranks()[rank]
    os.kill(pid, number)
    since = time.monotonic()
    ended = command.end()
    assert ended.code == code, ended.err
    message = ended.err[ended.err.rindex("podscale: ") :]
    assert re.search(expected.format(pid=pid), message), message
    assert " in the " in message  # which collective
    assert " of step " in message
    assert "same command" in message
    assert (
        time.monotonic() - since < 5 + 40
    )  # the timeout, a check of the other ranks, and the exit of the rank that does not answer
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_pods_with_different_documents_are_refused(start: Start, calm: Path) -> None:
    """Two pods of two nodes; the second has another bucket size.

    (Another `result` option would already be refused by the run directory.)
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: Any = probe.getsockname()[1]
    pods = []
    for node in range(2):
        rendezvous = {"PET_NNODES": "2", "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1"}
        rendezvous |= {"PET_MASTER_PORT": str(port), "PET_NPROC_PER_NODE": "1"}
        changes = ["launch.nodes=2", "launch.processes=1", f"train.all_reduce.bucket_mb={1 + node}"]
        pods.append(start("pods", *changes, variables={**rendezvous, "KUBERNETES_SERVICE_HOST": "x"}))
        if node == 0:
            pods[0].wait_for((calm / "runs" / "pods" / "environment.json").exists)  # it leads
    ends: list[Ended] = [pod.end() for pod in pods]
    for ended in ends:
        assert ended.code == ExitCode.BAD_INPUT, ended.err
        assert "train.all_reduce.bucket_mb" in ended.err


def test_nothing_is_left_in_the_temporary_directory(calm: Path) -> None:
    assert list((calm / "tmp").iterdir()) == []
