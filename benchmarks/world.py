"""Processes of a benchmark: ranks joined by gloo, and results sent through pipes."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from podscale.pytorch.world import World

P = ParamSpec("P")
T = TypeVar("T")
PRELOADED = ["podscale.pytorch.trainer"]
"""Modules that the fork server imports once, since importing torch takes longer than some measurements."""


def process_context() -> ForkServerContext:
    """Return a context of new processes with torch already imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_world(
    size: int, body: "Callable[Concatenate[World, P], T]", *arguments: P.args, **options: P.kwargs
) -> list[T]:
    """Return the result of `body(world, *arguments)` on each of `size` new gloo processes.

    Raises RuntimeError as soon as a rank fails or exits, and kills the others.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = process_context()
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_rank, args=(rank, size, port, pipes[rank][1], body, arguments, options))
        for rank in range(size)
    ]
    for rank, (_, writer) in zip(ranks, pipes, strict=True):
        rank.start()
        writer.close()  # so that the exit of a process closes its pipe
    try:
        answers = receive_answers([reader for reader, _ in pipes])
        for rank in ranks:
            rank.join(10)
        return answers
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def receive_answers(readers: Sequence[Connection], seconds: float | None = None) -> list[Any]:
    """Return what processes sent with `send_answer`, in the order of their pipes.

    Raises RuntimeError for the first process that failed or exited, TimeoutError after `seconds` without any answer.
    """
    answers: dict[Connection, Any] = {}
    while len(answers) < len(readers):
        ready = wait([reader for reader in readers if reader not in answers], timeout=seconds)
        if not ready:
            raise TimeoutError(f"no answer from {len(readers) - len(answers)} processes within {seconds:.0f} s")
        for reader in ready:
            assert isinstance(reader, Connection)
            number = readers.index(reader)
            try:
                succeeded, answers[reader] = reader.recv()
            except EOFError:
                raise RuntimeError(f"process {number} exited without an answer") from None
            if not succeeded:
                raise RuntimeError(f"process {number}: {answers[reader]}")
    return [answers[reader] for reader in readers]


def send_answer(pipe: Connection, body: Callable[[], object]) -> None:
    """Send the result of `body`, or the traceback of its exception."""
    try:
        answer = (True, body())
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)


def set_rank(rank: int, size: int, local_rank: int, local_size: int, address: str, port: int) -> None:
    """Set the environment variables of a rank, as torchrun does."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )


def _rank(
    rank: int,
    size: int,
    port: int,
    answer: Connection,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    set_rank(rank, size, rank, size, "127.0.0.1", port)
    import torch

    from podscale.pytorch import world

    torch.set_num_threads(1)
    send_answer(answer, lambda: body(world.join_world(120.0), *arguments, **options))
    world.leave_world()
