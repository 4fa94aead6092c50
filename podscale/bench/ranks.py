"""Ranks of a benchmark: local processes with torchrun's environment variables, stopped together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from podscale.util import env, host_info

EXIT_GRACE_SECONDS = 2.0
"""Time for other ranks to report an error after one has failed, seconds."""


def run_workers(
    module: str, arguments: Sequence[str], ranks: int, limit: float, *, threads: int = 0, log: Path | None = None
) -> list[int | None]:
    """Run `python -m module arguments` on every rank until all exit, one fails or the time limit passes.

    Returns the exit code of each rank, None for a rank that was killed.

    Args:
        module: Module to run.
        arguments: Its command line.
        ranks: Number of processes.
        limit: Time limit, seconds.
        threads: CPU threads of a rank; 0 for its share of the cores.
        log: File for the output; default: this process's output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, *arguments]
    deadline = time.monotonic() + limit
    with ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log is not None else None
        children = [
            subprocess.Popen(
                command,
                env=worker_environment(rank, ranks, port, threads),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that a compiler's workers are killed with it
            )
            for rank in range(ranks)
        ]
        try:
            return _wait_for_workers(children, deadline)
        finally:
            for child in children:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def worker_environment(rank: int, ranks: int, port: int, threads: int = 0) -> dict[str, str]:
    """Return this process's environment variables plus torchrun's.

    `port` is MASTER_PORT; `threads` are the CPU threads of a rank, 0 for its share of the cores. Ranks that share a GPU
    get different NCCL_HOSTIDs and use sockets, because NCCL allows one rank per device and host.
    """
    gpus = host_info.visible_gpus()
    variables = {
        env.OMP_NUM_THREADS: str(threads or max(1, host_info.cpu_count() // ranks)),
        **os.environ,
        env.RANK: str(rank),
        env.WORLD_SIZE: str(ranks),
        env.LOCAL_RANK: str(rank % gpus if gpus else rank),
        env.LOCAL_WORLD_SIZE: str(ranks),
        env.GROUP_RANK: "0",
        env.MASTER_ADDR: "127.0.0.1",
        env.MASTER_PORT: str(port),
    }
    if 0 < gpus < ranks:
        variables |= {"NCCL_HOSTID": f"podscale-{port}-{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    return variables


def _wait_for_workers(children: "list[subprocess.Popen[bytes]]", deadline: float) -> list[int | None]:
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if any(child.poll() for child in children):
            time.sleep(EXIT_GRACE_SECONDS)
            break
        time.sleep(0.05)
    return [child.poll() for child in children]
