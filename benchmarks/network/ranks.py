"""Ranks in a lab: one process each, in its namespace, joined by gloo over the lab's links."""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.network.lab import Lab
from benchmarks.network.wire import enter
from podscale.pytorch import world
from podscale.util.processes import exit_with_parent

PORT = 29500


def run_ranks(
    lab: Lab, body: Callable[..., Any], *arguments: Any, dealt_out: bool = False, seconds: float = 600.0
) -> list[Any]:
    """What `body(world, *arguments)` returns on every rank of the lab, by rank; ends all of them where one fails.

    dealt_out: rank r stands on node r % nodes, as where a scheduler places pods of one rank each, instead of filling
    node after node. Ranks are forked after torch was imported once: importing it cold takes longer than most tables.
    """
    torch.set_num_threads(1)  # a forked child must not wait for OpenMP threads that only its parent had
    shape = lab.shape
    places = [r % shape.nodes * shape.ranks + r // shape.nodes if dealt_out else r for r in range(shape.size)]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in places]
    ranks = [
        context.Process(target=_rank, args=(rank, lab, places, pipes[rank][1], body, arguments))
        for rank in range(len(places))
    ]
    for process in ranks:
        process.start()
    for _, writer in pipes:
        writer.close()  # so that the end of a process ends its pipe
    try:
        return _answers([reader for reader, _ in pipes], seconds)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _answers(readers: list[Connection], seconds: float) -> list[Any]:
    answers: dict[Connection, Any] = {}
    while len(answers) < len(readers):
        ready = wait([reader for reader in readers if reader not in answers], timeout=seconds)
        if not ready:
            raise TimeoutError(f"no answer from {len(readers) - len(answers)} ranks within {seconds:.0f} s")
        for reader in ready:
            assert isinstance(reader, Connection)
            good, answers[reader] = pickle.loads(reader.recv_bytes())
            if not good:
                raise RuntimeError(f"rank {readers.index(reader)}: {answers[reader]}")
    return [answers[reader] for reader in readers]


def _rank(rank: int, lab: Lab, places: list[int], answer: Connection, body: Any, arguments: tuple[Any, ...]) -> None:
    exit_with_parent()
    enter(lab.namespaces[places[rank]])
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(lab.shape.size),
        LOCAL_RANK=str(rank % lab.shape.ranks),
        LOCAL_WORLD_SIZE=str(lab.shape.ranks),
        MASTER_ADDR=lab.addresses[places[0]],
        MASTER_PORT=str(PORT),
        GLOO_SOCKET_IFNAME="eth0",
    )
    try:
        result = (True, body(world.join_world(300.0), *arguments))
    except BaseException:
        result = (False, traceback.format_exc())
    answer.send_bytes(pickle.dumps(result))
    os._exit(0)  # the parent's exit handlers, which take the lab down, are not a rank's to run
