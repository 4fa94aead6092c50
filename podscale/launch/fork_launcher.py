"""The rank processes of one pod: copies of a process that has imported what all of them need.

To import PyTorch takes seconds of a core and hundreds of megabytes. Ranks that are forked from the process which has
done it share both, however many they are.

Starts the ranks of one pod and keeps the store by which all ranks of the run meet: what torchrun is elsewhere.

Run as `python -m podscale.launch.fork_launcher OPTIONS MODULE`; needs no framework but what --preload imports, once for all
ranks. It waits for the other pods and starts its ranks, once; it ends none of them: whoever loses a peer says so
itself, and the supervisor has the last word. Each rank runs MODULE and is given RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, GROUP_RANK (number of the pod), `env.STORE`, and with several slices `env.SLICE` and `env.SLICES`.
"""

import argparse
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from podscale.distributed.store import Store, StoreClient, StoreError, StoreServer
from podscale.distributed.worker_exit import write_exit_status
from podscale.launch import worker_main
from podscale.launch.rejoin import BARRIER_TIMEOUT_SECONDS, BarrierTimeout, mark_rank_lost, pod_barrier
from podscale.launch.rendezvous import Rendezvous
from podscale.util import env
from podscale.util.env import RANK_DIR

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def preload_module(module: str) -> None:
    """Imports all that a module imports. Itself it is forgotten again: each rank runs it anew, as its main program."""
    importlib.import_module(module)
    del sys.modules[module]


class ForkServer:
    """Processes that wait until `begin` tells them who they are, and then each carry out `entry` (see rankprocess)."""

    def __init__(self, entry: str, count: int) -> None:
        """Forks them: from the main thread, to which their lives are bound, and while there is no other."""
        self._workers: dict[int, int] = {}
        self._pipes: list[int] = []
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # what is never looked at is never copied
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
        for number in range(count):
            reader, writer = os.pipe()
            self._pipes.append(writer)
            pid = os.fork()
            if pid == 0:
                _run_worker(entry, reader, self._pipes)
            self._workers[pid] = number
            os.close(reader)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)

    def start_workers(self, variables: Sequence[Mapping[str, str]]) -> None:
        """Gives each its variables; from here on a request to stop is theirs, and before, the end of all."""
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._forward_stop)
        for pipe, own in zip(self._pipes, variables, strict=True):
            with os.fdopen(pipe, "w") as writer:
                json.dump(dict(own), writer)

    def wait(self, on_killed: Callable[[int], None]) -> int:
        """Wait for all ranks; record the exit status of each that failed.

        Args:
            on_killed: Called with the number, within this pod, of each rank that a signal ended: it has no report.

        Returns:
            The first exit code that is not 0, else 0; 128 + n for signal n.
        """
        first = 0
        while self._workers:
            pid = _wait_for_exit()
            number = self._workers.pop(pid)  # while it is a zombie: nobody else can have its pid
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code != 0:
                write_exit_status(Path(os.environ[RANK_DIR]), pid, code)
                print(f"rank process {pid} ended with exit code {code}", file=sys.stderr, flush=True)
            if code < 0:
                on_killed(number)
            first = first or code
        return first if first >= 0 else 128 - first

    def _forward_stop(self, number: int, frame: FrameType | None) -> None:
        for pid in list(self._workers):
            os.kill(pid, signal.SIGTERM)


def _wait_for_exit() -> int:
    """Waits for the end of a child, and leaves it a zombie."""
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_pid


def _run_worker(entry: str, reader: int, writers: Sequence[int]) -> NoReturn:
    """A rank's life, in its own process; it ends unborn where its parent does before it has spoken."""
    try:
        for writer in writers:
            os.close(writer)
        with os.fdopen(reader) as pipe:
            told = pipe.read()
        if told:
            os.environ.update(json.loads(told))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
            sys.argv = [worker_main.__name__, entry]
            worker_main.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


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
    parser = argparse.ArgumentParser(prog="podscale.launch.fork_launcher")
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
