"""Starts the ranks of one pod and keeps the store by which all ranks of the run meet: what torchrun is elsewhere.

Run as `python -m podscale.launch.spawner OPTIONS MODULE`; needs no framework but what --preload imports, once for all
ranks. It waits for the other pods and starts its ranks, once; it ends none of them: whoever loses a peer says so
itself, and the supervisor has the last word. Each rank runs MODULE and is given RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, GROUP_RANK (number of the pod), `env.STORE`, and with several slices `env.SLICE` and `env.SLICES`.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

from podscale.distributed.store import Store, StoreClient, StoreError, StoreServer
from podscale.launch.gathering import BARRIER_TIMEOUT_SECONDS, BarrierTimeout, mark_rank_lost, pod_barrier
from podscale.launch.ranks import ForkServer, preload_module
from podscale.launch.rendezvous import Rendezvous
from podscale.util import env

REPORT_LOST_SECONDS = 5.0


def worker_variables(rendezvous: Rendezvous, count: int, local_rank: int, port: int) -> dict[str, str]:
    """What the rank number `local_rank` of the `count` in this pod is given; `port`: of the store."""
    assert rendezvous.node_rank is not None
    numbers = {
        "RANK": rendezvous.node_rank * count + local_rank,
        "WORLD_SIZE": rendezvous.nodes * count,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": rendezvous.node_rank,
    }
    if rendezvous.slices > 1:
        numbers |= {env.SLICE: rendezvous.slice, env.SLICES: rendezvous.slices}
    return {name: str(number) for name, number in numbers.items()} | {env.STORE: f"{rendezvous.address}:{port}"}


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks to their end; the exit code is that of the first that failed."""
    parser = argparse.ArgumentParser(prog="podscale.launch.spawner")
    for name in ("processes", "nodes", "node-rank", "slices", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--leaving", type=float, default=0.0)
    parser.add_argument("--preload")
    parser.add_argument("module")
    options = parser.parse_args(arguments)
    meeting = Rendezvous(options.nodes, options.node_rank, options.address, options.port, options.slices)
    assert meeting.node_rank is not None, "whoever starts these pods numbers them"
    if options.preload:
        preload_module(options.preload)
    ranks = ForkServer(options.module, options.processes)  # before there is another thread
    try:
        server = StoreServer("127.0.0.1" if meeting.nodes == 1 else "", meeting.port) if meeting.is_leader else None
    except OSError as error:
        print(f"the ranks cannot meet at port {meeting.port}: {error.strerror}", file=sys.stderr)
        return 1
    address, port = meeting.address, server.port if server is not None else meeting.port
    first = meeting.node_rank * options.processes
    try:
        if meeting.nodes > 1:
            pod_barrier(
                meeting,
                lambda: StoreClient(address, port, BARRIER_TIMEOUT_SECONDS),
                first,
                exit_grace_seconds=options.leaving,
            )
    except BarrierTimeout as absent:
        print(absent, file=sys.stderr)
        return 1
    ranks.start_workers(
        [worker_variables(meeting, options.processes, local_rank, port) for local_rank in range(options.processes)]
    )
    code = ranks.wait(
        lambda local_rank: _report_lost(StoreClient(address, port, REPORT_LOST_SECONDS), first + local_rank)
    )
    if server is not None:
        server.wait_for_clients()
    return code


def _report_lost(store: Store, rank: int) -> None:
    """Lets the other ranks know of one that was killed, if there still is a place to tell it."""
    with suppress(StoreError):
        mark_rank_lost(store, rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
