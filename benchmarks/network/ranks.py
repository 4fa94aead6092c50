"""Ranks in a lab: one process each, in its namespace, joined by gloo over the lab's links."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from benchmarks.network.lab import Lab
from benchmarks.network.wire import enter
from benchmarks.world import receive_answers, send_answer, set_rank
from podscale.pytorch import world
from podscale.util.processes import exit_with_parent

PORT = 29500
T = TypeVar("T")


def run_ranks(
    lab: Lab,
    body: Callable[..., T],
    *arguments: Any,
    places: Sequence[int] | None = None,
    seconds: float = 600.0,
) -> list[T]:
    """Return what `body(world, *arguments)` returns on every rank of the lab; kill all of them if one fails.

    Ranks are forked after torch was imported once: importing it cold takes longer than most tables.

    Args:
        lab: running.
        body: run by every rank.
        arguments: of the body.
        places: of each rank in the lab; default: node after node.
        seconds: to wait for an answer.
    """
    torch.set_num_threads(1)  # a forked child must not wait for OpenMP threads that only its parent had
    chosen = list(range(lab.shape.size)) if places is None else list(places)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in chosen]
    ranks = [
        context.Process(target=_rank, args=(rank, lab, chosen, pipes[rank][1], body, arguments))
        for rank in range(len(chosen))
    ]
    for process in ranks:
        process.start()
    for _, writer in pipes:
        writer.close()  # so that the end of a process ends its pipe
    try:
        return receive_answers([reader for reader, _ in pipes], seconds)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank(
    rank: int, lab: Lab, places: list[int], answer: Connection, body: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    exit_with_parent()
    enter(lab.namespaces[places[rank]])
    set_rank(rank, lab.shape.size, rank % lab.shape.ranks, lab.shape.ranks, lab.addresses[places[0]], PORT)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    send_answer(answer, lambda: body(world.join_world(300.0), *arguments))
    os._exit(0)  # the parent's exit handlers, which take the lab down, are not a rank's to run
