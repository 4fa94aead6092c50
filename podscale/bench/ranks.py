"""Ranks of a measurement: processes on this machine with torchrun's variables, which end together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from podscale.util import host_info

EXIT_GRACE_SECONDS = 2.0
"""Seconds that the others get to say what they know, once a rank has failed."""


def run_workers(
    module: str, arguments: Sequence[str], ranks: int, limit: float, *, threads: int = 0, log: Path | None = None
) -> list[int | None]:
    """Runs `python -m module arguments` on every rank until all have ended, one has failed, or `limit` seconds passed.

    Returns the exit codes by rank, None for one that had to be killed. threads: of a rank on the CPU; 0 = its share of
    the cores. log: a file for what they print; default: it goes where this process prints.
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
                start_new_session=True,  # so that a compiler's workers end with it
            )
            for rank in range(ranks)
        ]
        try:
            return _wait_for_workers(children, deadline)
        finally:
            for child in children:
                _kill_worker(child)


def worker_environment(rank: int, ranks: int, port: int, threads: int = 0) -> dict[str, str]:
    """This process's variables and torchrun's.

    Ranks that share a GPU pass for hosts of their own: NCCL allows one rank a device and host, and takes NCCL_HOSTID
    for the host; they then talk through sockets.
    """
    gpus = host_info.visible_gpus()
    found = {
        "OMP_NUM_THREADS": str(threads or max(1, host_info.cpu_count() // ranks)),
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % gpus if gpus else rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if 0 < gpus < ranks:
        found |= {"NCCL_HOSTID": f"podscale-{port}-{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    return found


def _wait_for_workers(children: "list[subprocess.Popen[bytes]]", deadline: float) -> list[int | None]:
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if any(child.poll() for child in children):
            time.sleep(EXIT_GRACE_SECONDS)
            break
        time.sleep(0.05)
    return [child.poll() for child in children]


def _kill_worker(child: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
