"""Starts the ranks of this pod: our own spawner, torchrun for PyTorch on several pods, or the rank itself if alone."""

import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from podscale.launch.podtask import WorkerSpec
from podscale.runs.lease import lease_wait_seconds
from podscale.util import env


def launch_command(spec: WorkerSpec, rank_dir: Path) -> list[str]:
    """The command line of this pod's child; torchrun keeps its own files in `rank_dir`, which is temporary."""
    rank = ["-m", "podscale.launch.rankprocess", spec.entry_module]
    if spec.single_process:
        return [sys.executable, *rank]
    if spec.uses_torchrun:
        return [sys.executable, "-m", "podscale.pytorch.torchrun", *_torchrun_options(spec, rank_dir), *rank]
    return [sys.executable, "-m", "podscale.launch.spawner", *_fork_launcher_options(spec), spec.entry_module]


def launch_environment(
    spec: WorkerSpec, rank_dir: Path, log_dir: Path, base: Mapping[str, str], *, lease: Path, fence: int | None
) -> dict[str, str]:
    """The child's environment: the contract of a rank (see rankprocess) on top of `base`."""
    variables = {
        **base,
        env.CONFIG: spec.document,
        env.STAGE: spec.stage,
        env.SHARD_SET: spec.shard_set,
        env.RANK_DIR: str(rank_dir),
        env.LOG_DIR: str(log_dir),
        env.LEASE: str(lease),
        env.SUPERVISOR: str(os.getpid()),
        "OMP_NUM_THREADS": str(spec.threads_per_process),
        # Versions of torchrun that know the setting wait this long before they kill; the supervisor itself kills
        # after the grace time, so this is longer.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(spec.grace_seconds) + 5),
        "PYTHONUNBUFFERED": "1",
        env.PROGRESS_FILE: str(progress_path(rank_dir, base)),
    }
    if fence is not None:
        variables[env.FENCE] = str(fence)
    else:
        variables[env.LEASE_PATIENCE] = str(lease_wait_seconds(spec.grace_seconds, base))
    if spec.single_process:
        variables.update(_single_process_environment())
    return variables


def progress_path(rank_dir: Path, base: Mapping[str, str]) -> Path:
    """Where the first rank writes how far an evaluation is: where our own launcher looks, or beside the reports."""
    return Path(base.get(env.PROGRESS_FILE) or rank_dir / "progress.json")


def start_launcher(arguments: list[str], variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts the child, in its own session and bound to our life; what it prints goes to `log`.

    Call it from the main thread: the bond is to the thread that starts the child.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "podscale.launch.orphans", *arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _fork_launcher_options(spec: WorkerSpec) -> list[str]:
    meeting = spec.rendezvous
    options: dict[str, object] = {
        "processes": spec.processes_per_node,
        "nodes": meeting.nodes,
        "node-rank": meeting.node_rank,
        "slices": meeting.slices,
        "address": meeting.address if meeting.nodes > 1 else "127.0.0.1",
        "port": meeting.port if meeting.nodes > 1 else 0,
        "leaving": spec.grace_seconds,
    }
    if not spec.worker_module:
        options["preload"] = spec.entry_module
    return [f"--{name}={value}" for name, value in options.items()]


def _torchrun_options(spec: WorkerSpec, rank_dir: Path) -> list[str]:
    """Only what this pod knows; how pods meet is torchrun's to read from the PET_* variables."""
    meeting = spec.rendezvous
    options = [
        f"--nproc-per-node={spec.processes_per_node}",
        f"--log-dir={rank_dir / 'torchrun'}",
        f"--max-restarts={spec.max_restarts}",
    ]
    if meeting.node_rank is not None:
        options += [
            f"--nnodes={meeting.nodes}",
            f"--node-rank={meeting.node_rank}",
            f"--master-addr={meeting.address}",
            f"--master-port={meeting.port}",
        ]
    return options


def _single_process_environment() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    counts = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    return {name: str(value) for name, value in counts.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
