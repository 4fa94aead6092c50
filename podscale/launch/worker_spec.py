"""Worker spec of one pod: its ranks, from the run document and the cluster's launcher, and the command to start them.

The launcher is torchrun for PyTorch on several pods, `fork_launcher` otherwise; a single rank starts directly.
"""

import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.launch.rendezvous import Rendezvous, read_rendezvous_env
from podscale.runs.lease import lease_wait_seconds
from podscale.util import env

WorkerStage = Literal["train", "evaluate"]
EngineName = Literal["pytorch", "jax"]


@dataclass(frozen=True)
class WorkerSpec:
    """Ranks of one stage of a run: pods, ranks per pod, CPU threads per rank, and the module that each rank runs."""

    run: str
    stage: WorkerStage
    shard_set: str
    document: str
    """The resolved run document as JSON."""
    rendezvous: Rendezvous
    processes_per_node: int
    threads_per_process: int
    grace_seconds: float
    max_restarts: int
    engine: EngineName = "pytorch"
    worker_module: str = ""
    """Module that each rank runs; empty: the worker module of its engine."""

    @property
    def world_size(self) -> int:
        return self.rendezvous.nodes * self.processes_per_node

    @property
    def entry_module(self) -> str:
        """Module that each rank runs."""
        return self.worker_module or f"podscale.{self.engine}.worker"

    @property
    def single_process(self) -> bool:
        """True for one process on one node."""
        return self.world_size == 1

    @property
    def uses_torchrun(self) -> bool:
        """True if torchrun starts the ranks: PyTorch on several pods, whose group it can restart."""
        return self.engine == "pytorch" and self.rendezvous.nodes > 1

    @property
    def is_leader(self) -> bool | None:
        """True if rank 0 runs in this pod; None if the rendezvous decides it later."""
        return self.rendezvous.is_leader


def build_worker_spec(
    config: RunConfig, stage: WorkerStage, shard_set: str, environ: Mapping[str, str], *, gpus: int, cores: int
) -> WorkerSpec:
    """Return the ranks of this pod; the launcher's environment variables override the document.

    Args:
        config: Run document.
        stage: Stage to run.
        shard_set: Location of the shards.
        environ: Environment variables of the pod.
        gpus: Visible GPUs of this pod.
        cores: CPU cores of this pod.

    Raises:
        InputError: A launcher's variable is invalid, or is missing although the document has several nodes.
    """
    rendezvous = read_rendezvous_env(environ)
    if rendezvous is None:
        if config.launch.nodes > 1:
            raise InputError(
                "PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT are not set, which a launcher sets in "
                "each pod",
                field="launch.nodes",
                got=config.launch.nodes,
                hint="On one machine use launch.nodes=1",
            )
        rendezvous = Rendezvous()
    processes = _process_count(config, environ, gpus)
    return WorkerSpec(
        run=config.run.id,
        stage=stage,
        shard_set=shard_set,
        document=config.model_dump_json(),
        rendezvous=rendezvous,
        processes_per_node=processes,
        threads_per_process=config.launch.threads or max(1, cores // processes),
        grace_seconds=config.launch.grace_seconds,
        max_restarts=config.launch.max_restarts,
        engine=config.train.engine,
    )


def is_leader_pod(environ: Mapping[str, str]) -> bool | None:
    """Return True if rank 0 runs in this pod; None if the rendezvous decides it later."""
    rendezvous = read_rendezvous_env(environ) or Rendezvous()
    return rendezvous.is_leader


def _process_count(config: RunConfig, environ: Mapping[str, str], gpus: int) -> int:
    """Return the launcher's count, else the document's, else one per GPU, else 1: one process drives all TPUs."""
    given = environ.get("PET_NPROC_PER_NODE", "auto")
    if given not in ("auto", "gpu", "cpu"):
        return max(1, env.number("PET_NPROC_PER_NODE", given))
    return config.launch.processes or max(1, gpus)


def launch_command(spec: WorkerSpec, rank_dir: Path) -> list[str]:
    """Return the command line of the launcher; torchrun writes its files to `rank_dir`, which is temporary."""
    rank = ["-m", "podscale.launch.worker_main", spec.entry_module]
    if spec.single_process:
        return [sys.executable, *rank]
    if spec.uses_torchrun:
        return [sys.executable, "-m", "podscale.pytorch.torchrun", *_torchrun_options(spec, rank_dir), *rank]
    return [sys.executable, "-m", "podscale.launch.fork_launcher", *_fork_launcher_options(spec), spec.entry_module]


def launch_environment(
    spec: WorkerSpec, rank_dir: Path, log_dir: Path, base: Mapping[str, str], *, lease: Path, fence: int | None
) -> dict[str, str]:
    """Return the launcher's environment: the variables of a worker (docs/environment.md) on top of `base`.

    Args:
        spec: Ranks of this pod.
        rank_dir: Temporary directory of this launch's reports.
        log_dir: Directory of the ranks' logs.
        base: Environment of the supervisor.
        lease: Lease file of the run.
        fence: Number of the supervisor's lease; None if rank 0 acquires the lease.
    """
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
    """Return the file for the progress of an evaluation: the one that the parent command reads, or in `rank_dir`."""
    return Path(base.get(env.PROGRESS_FILE) or rank_dir / "progress.json")


def start_launcher(arguments: list[str], variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start the launcher in its own session, with its output in `log`; it exits when this process exits.

    Call it from the main thread: the kernel ties the child to the thread that starts it.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "podscale.launch.process_cleanup", *arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _fork_launcher_options(spec: WorkerSpec) -> list[str]:
    rendezvous = spec.rendezvous
    options: dict[str, object] = {
        "processes": spec.processes_per_node,
        "nodes": rendezvous.nodes,
        "node-rank": rendezvous.node_rank,
        "slices": rendezvous.slices,
        "address": rendezvous.address if rendezvous.nodes > 1 else "127.0.0.1",
        "port": rendezvous.port if rendezvous.nodes > 1 else 0,
        "leaving": spec.grace_seconds,
    }
    if not spec.worker_module:
        options["preload"] = spec.entry_module
    return [f"--{name}={value}" for name, value in options.items()]


def _torchrun_options(spec: WorkerSpec, rank_dir: Path) -> list[str]:
    """Return the options that this pod knows; torchrun reads the rest from the PET_* variables."""
    rendezvous = spec.rendezvous
    options = [
        f"--nproc-per-node={spec.processes_per_node}",
        f"--log-dir={rank_dir / 'torchrun'}",
        f"--max-restarts={spec.max_restarts}",
    ]
    if rendezvous.node_rank is not None:
        options += [
            f"--nnodes={rendezvous.nodes}",
            f"--node-rank={rendezvous.node_rank}",
            f"--master-addr={rendezvous.address}",
            f"--master-port={rendezvous.port}",
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
