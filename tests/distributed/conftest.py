"""Fixture that runs a function on worlds of real processes."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import pytest

from tests.support.ports import free_port

RunWorld = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def run_world() -> RunWorld:
    """Return `run_world(size, body)`, which runs `body(world)` on `size` gloo processes and returns the values by rank.

    Its options are `timeout_seconds` of the collectives, and `seconds` to wait for the processes. Processes are forked
    after one import of torch, because a cold import takes longer than most worlds run.
    """
    import torch
    import torch._dynamo  # DistributedDataParallel imports it: seconds in every rank

    import podscale.data.loaders.pillow
    import podscale.data.node_cache
    import podscale.pytorch.worker  # noqa: F401  so that no rank imports the engine again

    torch.set_num_threads(1)  # a forked child must not wait for OpenMP threads that only its parent had

    def run(
        size: int, body: Callable[[Any], Any], *, seconds: float = 120.0, timeout_seconds: float = 60.0
    ) -> list[Any]:
        context = multiprocessing.get_context("fork")
        port = free_port()
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=_rank_main, args=(rank, size, port, timeout_seconds, body, pipes[rank][1]))
            for rank in range(size)
        ]
        _fork(processes)
        for _, writer in pipes:
            writer.close()  # so that the pipe closes when the process exits
        try:
            answers = _collect([reader for reader, _ in pipes], seconds)
            if not all(good for good, _ in answers):
                _show_stacks(processes)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
        failed = [f"rank {rank}: {value}" for rank, (good, value) in enumerate(answers) if not good]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    return run


def _fork(processes: list[ForkProcess]) -> None:
    """Start processes in which the garbage collector leaves the objects of this one alone.

    A finalizer may wait for a thread that only the parent has: earlier tests leave such objects, and a rank that
    collected one would never answer.
    """
    gc.freeze()
    try:
        for process in processes:
            process.start()
    finally:
        gc.unfreeze()


def _collect(readers: list[Connection], seconds: float) -> list[tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    while len(answers) < len(readers):
        ready = wait([r for n, r in enumerate(readers) if n not in answers], timeout=seconds)
        if not ready:
            return [answers.get(n, (False, f"no answer within {seconds} s")) for n in range(len(readers))]
        for number, reader in enumerate(readers):
            if reader in ready:
                answers[number] = _receive(reader)
    return [answers[n] for n in range(len(readers))]


def _show_stacks(processes: list[ForkProcess]) -> None:
    """Let the ranks that are still there print their stacks, which pytest shows with the failed test."""
    for process in processes:
        if process.is_alive():
            assert process.pid, "a running process has one"
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1)


def _receive(reader: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pickle.loads(reader.recv_bytes())
    except EOFError:
        return False, "ended without an answer"
    return answer


def _rank_main(
    rank: int, size: int, port: int, timeout_seconds: float, body: Callable[[Any], Any], answer: Connection
) -> None:
    faulthandler.register(signal.SIGUSR1)
    from podscale.pytorch import world

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        result = (True, body(world.join_world(timeout_seconds)))
    except BaseException:
        result = (False, traceback.format_exc())
    answer.send_bytes(pickle.dumps(result))
    world.leave_world()
    os._exit(0)  # without the parent's atexit handlers (pytest's, coverage's)
