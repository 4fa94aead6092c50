"""Worlds of real processes: each rank runs a function of a test and returns its value.

Ranks are forked from a server that has only imported what they need. The pytest process itself must not fork them:
earlier tests leave threads, pools of threads and objects there that are broken in a child (torch then ends the rank
with "Invalid thread pool" or refuses its first backward pass). A fresh interpreter a rank would import torch for longer
than most worlds run.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from benchmarks.world import set_rank
from tests.support.ports import free_port

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "PIL.ImageFile",
        "numpy.ma",  # numpy.unique imports it
        "pytest",  # modules of tests import it
        "torch",
        "torch._dynamo",  # DistributedDataParallel imports it
        "podscale.data.loaders.cpu",
        "podscale.data.node_cache",
        "podscale.pytorch.worker",
    ]
)


def run_world(
    size: int, body: Callable[[Any], Any], *, seconds: float = 120.0, timeout_seconds: float = 60.0
) -> list[Any]:
    """Run `body(world)` on `size` gloo processes and return the values by rank.

    `timeout_seconds` is the limit of the collectives, `seconds` that of the processes. Functions of a test's module are
    imported by each rank; a lambda is sent with what it refers to.
    """
    task, environment, port = cloudpickle.dumps(body), dict(os.environ), free_port()
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
    processes = [
        CONTEXT.Process(target=run_rank, args=(rank, size, port, environment, timeout_seconds, task, pipes[rank][1]))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, writer in pipes:
        writer.close()  # so that the pipe closes when the process exits
    try:
        answers = collect([reader for reader, _ in pipes], seconds)
        if not all(good for good, _ in answers):
            show_stacks([process.pid for process in processes if process.is_alive()])
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    failed = [f"rank {rank}: {value}" for rank, (good, value) in enumerate(answers) if not good]
    assert not failed, "\n".join(failed)
    return [value for _, value in answers]


def collect(readers: list[Connection], seconds: float) -> list[tuple[bool, Any]]:
    """Return each rank's answer: whether it succeeded, and its value or its error."""
    answers: dict[int, tuple[bool, Any]] = {}
    while len(answers) < len(readers):
        ready = wait([r for n, r in enumerate(readers) if n not in answers], timeout=seconds)
        if not ready:
            return [answers.get(n, (False, f"no answer within {seconds} s")) for n in range(len(readers))]
        for number, reader in enumerate(readers):
            if reader in ready:
                answers[number] = receive(reader)
    return [answers[n] for n in range(len(readers))]


def receive(reader: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pickle.loads(reader.recv_bytes())
    except EOFError:
        return False, "ended without an answer"
    return answer


def show_stacks(pids: list[int | None]) -> None:
    """Let the ranks that are still there print their stacks, which pytest shows with the failed test."""
    for pid in pids:
        assert pid, "a running process has one"
        with contextlib.suppress(ProcessLookupError):  # it may end between the question and the signal
            os.kill(pid, signal.SIGUSR1)
    time.sleep(1)


def run_rank(
    rank: int,
    size: int,
    port: int,
    environment: dict[str, str],
    timeout_seconds: float,
    task: bytes,
    answer: Connection,
) -> None:
    """Join the world, run the task, send its answer and end without the handlers of the server."""
    faulthandler.register(signal.SIGUSR1)
    os.environ.clear()
    os.environ.update(environment)
    set_rank(rank, size, rank, size, "127.0.0.1", port)
    import torch

    torch.set_num_threads(1)  # before any thread starts: ranks share the cores
    from podscale.pytorch import world

    try:
        result = (True, pickle.loads(task)(world.join_world(timeout_seconds)))
    except BaseException:
        result = (False, traceback.format_exc())
    answer.send_bytes(cloudpickle.dumps(result))
    world.leave_world()
    os._exit(0)
