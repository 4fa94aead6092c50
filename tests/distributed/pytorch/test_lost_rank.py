"""A rank is killed or stopped during a step: the others exit in time, and name it and the collective."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from podscale.config.ranks import BatchNormGroup
from podscale.distributed.failure_report import PeerWatch
from podscale.errors import PodscaleError
from podscale.pytorch.all_reduce import FlatAllReduce
from podscale.pytorch.batch_norm import BatchNorm, assign_batch_norm_groups
from podscale.pytorch.collective_errors import collective_failures
from podscale.pytorch.reducer import BucketedReducer
from podscale.pytorch.step_sync import StepSync
from podscale.pytorch.train_step import StepResult
from podscale.pytorch.world import World, join_torch_rank_group, leave_world

TIMEOUT, BEAT = 2.0, 0.25
DIES_AT = 3

RunStep = Callable[[int], None]


def bucket(world: World) -> RunStep:
    torch.manual_seed(0)
    reducer = BucketedReducer(
        nn.Sequential(nn.Linear(8, 600), nn.Linear(600, 8)), FlatAllReduce(world), world, bucket_mb=0.01
    )

    def run_step(step: int) -> None:
        reducer.start_step()
        reducer.backward(reducer.module(torch.ones(1, 8)).sum(), last=True)
        reducer.finish()

    return run_step


def batch_norm(world: World) -> RunStep:
    layer = BatchNorm(4)
    assign_batch_norm_groups(layer, world, BatchNormGroup(world.size, 2))
    return lambda step: layer(torch.rand(2, 4, 3, 3)).sum().backward()


def control(world: World) -> RunStep:
    step_sync = StepSync(world, lag=0)

    def run_step(step: int) -> None:
        step_sync.send(step, StepResult(torch.tensor(1.0), torch.tensor(True)), busy_seconds=0.0, stop=False)
        step_sync.ready()

    return run_step


def barrier(world: World) -> RunStep:
    return lambda step: world.barrier()


def lose(
    run_world: Any, directory: Path, build: Callable[[World], RunStep], number: signal.Signals, victim: int
) -> dict[int, tuple[int, str, float]]:
    """Send `number` to one of 4 ranks. Returns exit code, error and seconds since then of each survivor."""

    def answers() -> list[Path]:
        return list(directory.glob("answer-*"))

    def body(world: World) -> None:

        run_step = build(world)
        (directory / f"pid-{world.rank}").write_text(str(os.getpid()))
        world.barrier()
        try:
            with PeerWatch(
                join_torch_rank_group(TIMEOUT), lambda error: None, collective_failures(), interval_seconds=BEAT
            ) as tracker:
                for step in range(1000):
                    tracker.enter_phase("forward_backward")
                    if step == DIES_AT and world.rank == victim:
                        time.sleep(2 * BEAT)  # so that the others are waiting
                        os.kill(os.getpid(), number)
                    started = time.monotonic()
                    run_step(step)
                    tracker.step_done(step + 1)
        except PodscaleError as error:
            text = f"{int(error.exit_code)}\n{time.monotonic() - started}\n{error}"
            (directory / f"answer-{world.rank}").write_text(text)
        deadline = time.monotonic() + 10
        while len(answers()) < world.size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        if number is signal.SIGSTOP and world.rank == (victim + 1) % world.size:
            os.kill(int((directory / f"pid-{victim}").read_text()), signal.SIGKILL)

    with pytest.raises(AssertionError, match=f"rank {victim}: ended without an answer"):
        run_world(4, body, timeout_seconds=TIMEOUT)
    errors = {}
    for path in answers():
        code, seconds, text = path.read_text().split("\n", 2)
        errors[int(path.name.partition("-")[2])] = (int(code), text, float(seconds))
    assert sorted(errors) == [rank for rank in range(4) if rank != victim]
    return errors


@pytest.mark.parametrize(
    ("build", "victim", "number", "collective"),
    [
        (bucket, 2, signal.SIGSTOP, "in the average of gradient bucket 1"),
        (bucket, 2, signal.SIGKILL, "in the average of gradient bucket 1"),
        (batch_norm, 2, signal.SIGSTOP, "in the statistics of batch norm"),
        (control, 2, signal.SIGSTOP, "in the step status"),
        (barrier, 2, signal.SIGSTOP, "in a barrier"),
        (bucket, 0, signal.SIGSTOP, "in the average of gradient bucket 1"),
        (bucket, 0, signal.SIGKILL, "in the average of gradient bucket 1"),
    ],
)
def test_the_others_name_the_rank_and_the_collective(
    run_world: Any,
    tmp_path: Path,
    build: Callable[[World], RunStep],
    victim: int,
    number: signal.Signals,
    collective: str,
) -> None:
    stopped = number is signal.SIGSTOP
    for rank, (code, text, seconds) in lose(run_world, tmp_path, build, number, victim).items():
        first = text.splitlines()[0]
        assert code == (76 if stopped else 77), text
        assert first.startswith(f"rank {rank} of 4 ")
        assert collective in first
        assert f"of step {DIES_AT + 1}" in first
        pid = (tmp_path / f"pid-{victim}").read_text()  # of rank 0 too, although it serves the store here
        assert re.search(rf"rank {victim} is \w+ \(process {pid} on ", first), first
        assert "forward_backward" in first
        assert [f"rank {other} " in first.partition("): ")[2] for other in range(4) if other != victim] == [False] * 3
        assert seconds < TIMEOUT + 10


def test_a_slow_rank_is_reported_as_behind_and_not_as_missing(run_world: Any) -> None:
    """Rank 1 stays in data_wait until the waits of the others time out."""

    def body(world: World) -> str:
        rank_group = join_torch_rank_group(TIMEOUT)
        try:
            with PeerWatch(rank_group, lambda error: None, collective_failures(), interval_seconds=2 * BEAT) as tracker:
                tracker.step_done(7)
                world.barrier()
                if world.rank == 1:
                    tracker.enter_phase("data_wait")
                    time.sleep(TIMEOUT + 16 * BEAT)
                    return ""
                tracker.step_done(8)
                world.barrier()
        except PodscaleError as error:
            return str(error).splitlines()[0]
        raise AssertionError("rank 1 was not reported")

    errors = run_world(3, body, timeout_seconds=TIMEOUT)
    for rank in (0, 2):
        assert " rank 1 (process " in errors[rank]
        assert errors[rank].count("(process ") == 1, "no rank is missing"
        assert all(f" {word}" in errors[rank].partition("rank 1 (process ")[2] for word in ("data_wait", "step 8"))


def test_the_peers_of_a_failed_rank_report_its_error(run_world: Any) -> None:
    def body(world: World) -> str:
        try:
            with PeerWatch(
                join_torch_rank_group(TIMEOUT), lambda error: None, collective_failures(), interval_seconds=BEAT
            ):
                world.barrier()
                if world.rank == 2:
                    raise ValueError("index 3 is out of bounds")
                world.barrier()
        except ValueError:
            leave_world()
            return ""
        except PodscaleError as error:
            return str(error).splitlines()[0]
        raise AssertionError("rank 2 was not reported")

    for message in run_world(3, body, timeout_seconds=TIMEOUT)[:2]:
        assert re.search("rank 2 .*: index 3 is out of bounds$", message)


def test_a_failed_gpu_is_named_on_every_rank(run_world: Any) -> None:
    """Rank 1 raises what torch raises; the others wait for it in a collective."""
    gpu, text = "cuda:1, NVIDIA H100, PCI:0000:3b:00", "CUDA error: uncorrectable ECC error encountered\nSearch for it"

    def body(world: World) -> tuple[str, str]:
        try:
            with PeerWatch(
                join_torch_rank_group(TIMEOUT), lambda error: None, collective_failures(), interval_seconds=BEAT
            ) as tracker:
                tracker.device = gpu.replace("1", str(world.rank), 1)
                world.barrier()
                if world.rank == 1:
                    raise torch.AcceleratorError(text)
                world.barrier()
        except PodscaleError as error:
            leave_world()
            return type(error).__name__, str(error)
        raise AssertionError("no failure was reported")

    answers = run_world(3, body, timeout_seconds=TIMEOUT)
    failed, peers = answers[1], (answers[0], answers[2])
    assert failed[0] == "GpuFailed"
    assert failed[1].startswith("rank 1 of 3: ")
    assert f"({gpu}; process " in failed[1]
    for kind, message in peers:
        assert kind == "PeerLost"
        assert f"({gpu}; " in message.partition("rank 1 of 3: ")[2]
        assert "docs/runbooks/PodscaleGPUXid.md" in message


def test_a_rank_whose_collectives_never_return_exits_by_its_heartbeat(run_world: Any) -> None:
    """Simulate NCCL, whose collectives wait on the device: only the heartbeat thread can detect the failure."""

    def body(world: World) -> tuple[int, str]:
        ended: list[PodscaleError] = []
        started = time.monotonic()
        with PeerWatch(
            join_torch_rank_group(TIMEOUT), ended.append, collective_failures(silent=True), interval_seconds=BEAT
        ) as tracker:
            tracker.step_done(1)
            tracker.enter_phase("allreduce_wait")
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
                return 0, ""  # rank 0 sends SIGCONT
            while not ended and time.monotonic() < started + 20:
                time.sleep(0.05)
        os.kill(int(str(ended[0]).partition("(process ")[2].partition(" ")[0]), signal.SIGCONT)
        return int(ended[0].exit_code), str(ended[0]).splitlines()[0]

    code, text = run_world(2, body, timeout_seconds=60)[0]
    assert code == 76
    assert text.startswith("rank 0 of 2 ")
    assert " allreduce_wait" in text
    assert re.search(r" rank 1 \w+ stopped ", text), "the exit code is that of a rank that is slow as well"


def test_a_step_that_never_ends_is_a_hang(run_world: Any, tmp_path: Path) -> None:
    """The time since the last step decides, even if no rank waits for this one. An evaluation has no limit."""
    limit = 1.0

    def body(world: World) -> list[tuple[int, str]]:
        ended: list[PodscaleError] = []
        with PeerWatch(
            join_torch_rank_group(60),
            ended.append,
            collective_failures(),
            interval_seconds=BEAT,
            hang_seconds=limit,
            stack_directory=tmp_path,
        ) as tracker:
            for step in range(20):
                tracker.enter_phase("forward_backward")
                tracker.step_done(step, 0.01)
            tracker.enter_phase("evaluation")
            time.sleep(3 * limit)
            assert not ended
            tracker.enter_phase("data_wait")
            deadline = time.monotonic() + 60
            while not ended and time.monotonic() < deadline:
                time.sleep(BEAT)
        return [(int(error.exit_code), str(error)) for error in ended]

    (((code, text),),) = run_world(1, body)
    assert code == 76
    assert text.startswith("rank 0 of 1 ")
    assert " data_wait " in text
    assert " step 20" in text
    assert f" {tmp_path}." in text
    assert "test_lost_rank.py" in (tmp_path / "rank-0.txt").read_text()


def test_a_suspended_process_reports_no_hang(run_world: Any) -> None:
    """Simulate a paused container or a migrated virtual machine."""
    limit, pause = 6.0, 9.0

    def body(world: World) -> int:
        ended: list[PodscaleError] = []
        with PeerWatch(
            join_torch_rank_group(60), ended.append, collective_failures(), interval_seconds=BEAT, hang_seconds=limit
        ) as tracker:
            for step in range(20):
                tracker.enter_phase("forward_backward")
                tracker.step_done(step, 0.01)
            subprocess.Popen(["sh", "-c", f"sleep {pause}; kill -CONT {os.getpid()}"])
            stopped = time.monotonic()
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(4 * BEAT)  # the heartbeat runs before any progress
            while time.monotonic() < stopped + pause + 8 * BEAT:
                tracker.step_done(20, 0.01)
                time.sleep(BEAT)
        return len(ended)

    assert run_world(1, body) == [0]
