"""A world of real processes for benchmarks of the engine."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any


def run_world(size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `body(world, *arguments)` returns on each of `size` fresh gloo processes; raises where one dies."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_rank, args=(rank, size, port, pipes[rank][1], body, arguments)) for rank in range(size)
    ]
    for rank, (_, writer) in zip(ranks, pipes, strict=True):
        rank.start()
        writer.close()  # so that the end of a process ends its pipe
    try:
        return [reader.recv() for reader, _ in pipes]
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()


def _rank(rank: int, size: int, port: int, answer: Any, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    from podscale.pytorch import world

    torch.set_num_threads(1)
    answer.send(body(world.join_world(120.0), *arguments))
    world.leave_world()
