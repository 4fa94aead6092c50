"""Two pods of a pipeline's job whose launcher is silent: both save, end, and later resume to the same bits."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podscale.errors import ExitCode
from podscale.runs import RunDirectory
from podscale.runs.launcher_heartbeat import LauncherHeartbeat, forget_silence, is_abandoned
from podscale.telemetry.events import read_records
from tests.support.commands import Command, copy_workspace, different, result
from tests.support.ports import free_port

FAULT_INJECTION = Path(__file__).parents[1] / "fault_injection"
GRACE_SECONDS = 6.0
"""Longer than a heartbeat may be late on a busy machine."""
STEP_SECONDS = 0.5
"""Least time of a step; the 68 steps of the training take several times the grace time."""
pytestmark = pytest.mark.timeout(900)
Start = Callable[..., tuple[Command, ...]]


@pytest.fixture
def workspace(calm: Path, tmp_path: Path) -> Path:
    copy_workspace(calm, tmp_path / "workspace")
    (tmp_path / "workspace" / "slow").touch()
    return tmp_path / "workspace"


@pytest.fixture
def run(workspace: Path) -> RunDirectory:
    return RunDirectory(workspace / "runs" / "silent")


@pytest.fixture
def start(workspace: Path) -> Iterator[Start]:
    """Return start(number, ...), which starts pods; by default both."""
    started: list[Command] = []

    def begin(*numbers: int, grace_seconds: float = GRACE_SECONDS) -> tuple[Command, ...]:
        port = free_port()
        numbers = numbers or (0, 1)
        for number in numbers:
            temporary = workspace.parent / f"pod-{number}"  # it outlives the pod's container
            temporary.mkdir(exist_ok=True)
            variables = {
                "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                "TMPDIR": str(temporary),
                "PET_NNODES": "2",
                "PET_NODE_RANK": str(number),
                "PET_MASTER_ADDR": "127.0.0.1",
                "PET_MASTER_PORT": str(port),
                "PET_NPROC_PER_NODE": "1",
                "PODSCALE_LAUNCHER_GRACE": str(grace_seconds),
                "PODSCALE_TERMINATION_LOG": str(workspace / f"message-{number}"),
                "PYTHONPATH": str(FAULT_INJECTION),
                "INJECTED_FAULT": f"rest:{workspace}/slow:{STEP_SECONDS}",
            }
            changes = ("--set", "run.id=silent", "--set", "launch.nodes=2", "--set", "launch.processes=1")
            started.append(Command(workspace, "train", "run.yaml", *changes, variables=variables))
        return tuple(started[-len(numbers) :])

    yield begin
    for command in started:
        command.kill()


@pytest.mark.slow
def test_both_pods_of_a_silent_launcher_save_end_and_resume(
    start: Start, workspace: Path, run: RunDirectory, calm: Path
) -> None:
    with LauncherHeartbeat(run, GRACE_SECONDS):
        pods = start()
        pods[0].wait_for_steps(run.path, 20)  # longer than the grace time
    ended = [pod.end() for pod in pods]
    assert [pod.code for pod in ended] == [ExitCode.PREEMPTED] * 2, ended
    assert is_abandoned(run, "train")
    records = list(read_records(run.metrics))
    assert "launcher_lost" in [record.get("event") for record in records]

    restarted = [pod.end() for pod in start()]  # by their operator
    assert [pod.code for pod in restarted] == [ExitCode.DONE] * 2, restarted
    messages = [json.loads((workspace / f"message-{number}").read_text()) for number in range(2)]
    assert [message["exit_code"] for message in messages] == [ExitCode.PREEMPTED] * 2
    assert list(read_records(run.metrics)) == records, "no pod trains"

    forget_silence(run)  # as the next launcher does
    (workspace / "slow").unlink()
    assert [pod.end().code for pod in start(grace_seconds=600.0)] == [ExitCode.DONE] * 2
    assert different(result(run.path), result(calm / "runs" / "calm")) == []


def test_a_pod_that_waits_for_the_leading_pod_ends_too(start: Start, run: RunDirectory) -> None:
    """Without this it would hold its node until its rendezvous times out, again and again."""
    (pod,) = start(1)
    assert pod.end().code == ExitCode.PREEMPTED
    assert is_abandoned(run, "train")
    (restarted,) = start(1)
    assert restarted.end().code == ExitCode.DONE
