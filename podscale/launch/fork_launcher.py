"""Launcher of one pod's ranks in place of torchrun: forks them from one process and serves the store of the run.

Run as `python -m podscale.launch.fork_launcher OPTIONS MODULE`. The launcher imports the module of --preload once, so
that all ranks share its import time and memory: PyTorch alone takes seconds and hundreds of megabytes. It then waits
for the other pods and starts its ranks, once, each with the variables of its `RankEnv`. It kills no rank: a rank that
loses a peer reports it and exits, and the supervisor kills the rest.
"""

import argparse
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from podscale.distributed.startup_clock import StartupClock
from podscale.distributed.store import Store, StoreClient, StoreError, StoreServer
from podscale.distributed.worker_env import RankEnv
from podscale.distributed.worker_exit import write_exit_status
from podscale.launch import worker_main
from podscale.launch.rejoin import BARRIER_TIMEOUT_SECONDS, BarrierTimeout, mark_rank_lost, pod_barrier
from podscale.launch.rendezvous import Rendezvous
from podscale.util import env

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPORT_LOST_SECONDS = 5.0
"""Store timeout for the report of a lost rank, seconds."""


class ForkServer:
    """Forked processes that wait for `start_workers` and then run the module `entry` (see worker_main)."""

    def __init__(self, entry: str, count: int) -> None:
        """Fork `count` processes. Call it from the main thread, before other threads start."""
        self._workers: dict[int, int] = {}
        self._pipes: list[int] = []
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # the garbage collector would copy shared pages
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
        """Send each process its environment variables, and from then on forward stop signals to the ranks."""
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._forward_stop)
        for pipe, environment in zip(self._pipes, variables, strict=True):
            with os.fdopen(pipe, "w") as writer:
                json.dump(dict(environment), writer)

    def wait(self, on_killed: Callable[[int], None]) -> int:
        """Wait for all ranks and return the first nonzero exit code (128 + n for signal n), else 0.

        Records the exit status of each failed rank. `on_killed` receives the local rank of each rank that a signal
        killed, because such a rank writes no report.
        """
        first_code = 0
        while self._workers:
            pid = _wait_for_exit()
            number = self._workers.pop(pid)  # while it is a zombie: its pid cannot be reused
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code != 0:
                write_exit_status(env.require_path(env.RANK_DIR), pid, code)
                print(f"rank process {pid} exited with code {code}", file=sys.stderr, flush=True)
            if code < 0:
                on_killed(number)
            first_code = first_code or code
        return first_code if first_code >= 0 else 128 - first_code

    def _forward_stop(self, number: int, frame: FrameType | None) -> None:
        for pid in list(self._workers):
            os.kill(pid, signal.SIGTERM)


def _wait_for_exit() -> int:
    """Wait until a child exits, leave it as a zombie and return its pid."""
    status = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert status is not None
    return status.si_pid


def _run_worker(entry: str, reader: int, writers: Sequence[int]) -> NoReturn:
    """Run one rank in the forked process; exits if the parent exits before sending the environment."""
    try:
        for writer in writers:
            os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        if text:
            os.environ.update(json.loads(text))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
            sys.argv = [worker_main.__name__, entry]
            worker_main.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def build_rank_env(rendezvous: Rendezvous, count: int, local_rank: int, port: int) -> RankEnv:
    assert rendezvous.node_rank is not None
    return RankEnv(
        rank=rendezvous.node_rank * count + local_rank,
        world_size=rendezvous.nodes * count,
        local_rank=local_rank,
        local_world_size=count,
        store_address=rendezvous.address,
        store_port=port,
        slice_id=rendezvous.slice,
        slice_count=rendezvous.slices,
        node=rendezvous.node_rank,
    )


def main(arguments: Sequence[str]) -> int:
    """Run the ranks of this pod and return the exit code of the first rank that failed, else 0."""
    parser = argparse.ArgumentParser(prog="podscale.launch.fork_launcher")
    for name in ("processes", "nodes", "node-rank", "slices", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--grace-seconds", type=float, default=0.0)
    parser.add_argument("--preload")
    parser.add_argument("module")
    options = parser.parse_args(arguments)
    rendezvous = Rendezvous(options.nodes, options.node_rank, options.address, options.port, options.slices)
    if options.preload:
        worker_main.preload_module(options.preload)
        startup = StartupClock.read()
        startup.end_part("imports")
        os.environ.update(startup.variables())  # for the ranks
    workers = ForkServer(options.module, options.processes)  # before there is another thread
    server = None
    try:
        if rendezvous.is_leader:
            server = StoreServer("127.0.0.1" if rendezvous.nodes == 1 else "", rendezvous.port)
    except OSError as error:
        print(f"cannot open port {rendezvous.port} for the rendezvous: {error.strerror}", file=sys.stderr)
        return 1
    port = server.port if server is not None else rendezvous.port
    rank_envs = [build_rank_env(rendezvous, options.processes, number, port) for number in range(options.processes)]

    def connect(timeout_seconds: float) -> StoreClient:
        return StoreClient(rendezvous.address, port, timeout_seconds)

    try:
        if rendezvous.nodes > 1:
            pod_barrier(
                rendezvous,
                lambda: connect(BARRIER_TIMEOUT_SECONDS),
                rank_envs[0].rank,
                exit_grace_seconds=options.grace_seconds,
            )
    except BarrierTimeout as timeout:
        print(timeout, file=sys.stderr)
        return 1
    workers.start_workers([rank_env.variables() for rank_env in rank_envs])
    code = workers.wait(lambda number: _report_lost(connect(REPORT_LOST_SECONDS), rank_envs[number].rank))
    if server is not None:
        server.wait_for_clients()
    return code


def _report_lost(store: Store, rank: int) -> None:
    """Report a killed rank to the other ranks, if the store still runs."""
    with suppress(StoreError):
        mark_rank_lost(store, rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
