"""Starts the ranks of one pod and keeps the store by which all ranks of the run meet: what torchrun is to PyTorch.

Run as `python -m podscale.launch.spawner OPTIONS -- MODULE ARGUMENTS`; needs no framework. It waits for the other pods
and starts its ranks, once; it ends none of them: whoever loses a peer says so itself, and the supervisor has the last
word. Each rank is given RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK (the pod's number), PODSCALE_STORE
(host:port), and where there are several slices PODSCALE_SLICE and PODSCALE_SLICES.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType

from podscale.launch.gathering import JOIN_SECONDS, NotGathered, gather, tell_lost
from podscale.launch.rendezvous import SLICE, Rendezvous
from podscale.store import Store, StoreError
from podscale.store.client import RemoteStore
from podscale.store.server import StoreServer

STORE = "PODSCALE_STORE"
SLICES = "PODSCALE_SLICES"
TELL_SECONDS = 5.0


def variables(meeting: Rendezvous, count: int, local_rank: int, port: int) -> dict[str, str]:
    """What the rank number `local_rank` of the `count` in this pod is given; `port`: of the store."""
    assert meeting.node_rank is not None
    numbers = {
        "RANK": meeting.node_rank * count + local_rank,
        "WORLD_SIZE": meeting.nodes * count,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": meeting.node_rank,
    }
    if meeting.slices > 1:
        numbers |= {SLICE: meeting.slice, SLICES: meeting.slices}
    return {name: str(number) for name, number in numbers.items()} | {STORE: f"{meeting.address}:{port}"}


class Ranks:
    """The rank processes of this pod."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        """A request to stop is passed on to them, and before their start ends this process."""
        self._stopped = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        self._children: list[subprocess.Popen[bytes]] = []
        for environment in environments:
            if not self._stopped:
                self._children.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))

    def wait(self, killed: Callable[[int], None]) -> int:
        """Returns when all have ended, with the first exit code that is not 0; tells how each ended that failed.

        killed: called with the number of a rank in this pod that a signal has ended, and so cannot say it itself.
        """
        code, running = 0, list(self._children)
        while running:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            for child in [child for child in running if child.poll() is not None]:
                running.remove(child)
                if child.returncode != 0:
                    print(f"a rank ended: exitcode: {child.returncode} (pid: {child.pid})", file=sys.stderr, flush=True)
                if child.returncode < 0:
                    killed(self._children.index(child))
                code = code or child.returncode
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True
        for child in self._children:
            child.send_signal(signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks to their end; the exit code is that of the first that failed."""
    parser = argparse.ArgumentParser(prog="podscale.launch.spawner")
    for name in ("processes", "nodes", "node-rank", "slices", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--leaving", type=float, default=0.0)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    meeting = Rendezvous(options.nodes, options.node_rank, options.address, options.port, options.slices)
    assert meeting.node_rank is not None, "whoever starts JAX's pods numbers them"
    try:
        server = StoreServer("127.0.0.1" if meeting.nodes == 1 else "", meeting.port) if meeting.leads else None
    except OSError as error:
        print(f"the ranks cannot meet at port {meeting.port}: {error.strerror}", file=sys.stderr)
        return 1
    address, port = meeting.address, server.port if server is not None else meeting.port
    first = meeting.node_rank * options.processes
    try:
        if meeting.nodes > 1:
            gather(meeting, lambda: RemoteStore(address, port, JOIN_SECONDS), first, leaving=options.leaving)
    except NotGathered as absent:
        print(absent, file=sys.stderr)
        return 1
    command = [sys.executable, "-m", *options.command]
    environments = [
        {**os.environ, **variables(meeting, options.processes, local_rank, port)}
        for local_rank in range(options.processes)
    ]
    code = Ranks(command, environments).wait(
        lambda local_rank: _tell(RemoteStore(address, port, TELL_SECONDS), first + local_rank)
    )
    if server is not None:
        server.linger()
    return code


def _tell(store: Store, rank: int) -> None:
    """Lets the other ranks know of one that was killed, if there still is a place to tell it."""
    with suppress(StoreError):
        tell_lost(store, rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
