"""Starts the ranks of this pod: our own spawner, torchrun for PyTorch on several pods, or the rank itself if alone.

What one pod of a job carries out: its part of one stage, by the document and by what its launcher says.
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
    """One stage of one run on `nodes` pods with `processes` ranks each; `threads` CPU threads a rank."""

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
    """What each rank runs; empty: the entry of its engine."""

    @property
    def world_size(self) -> int:
        return self.rendezvous.nodes * self.processes_per_node

    @property
    def entry_module(self) -> str:
        """The module that each rank runs."""
        return self.worker_module or f"podscale.{self.engine}.worker"

    @property
    def single_process(self) -> bool:
        """One process on one node: nobody to meet."""
        return self.world_size == 1

    @property
    def uses_torchrun(self) -> bool:
        """Whether torchrun starts the ranks: PyTorch's on several pods, of which it may make a new world."""
        return self.engine == "pytorch" and self.rendezvous.nodes > 1

    @property
    def is_leader(self) -> bool | None:
        """As the rendezvous' own."""
        return self.rendezvous.is_leader


def build_worker_spec(
    config: RunConfig, stage: WorkerStage, shard_set: str, environ: Mapping[str, str], *, gpus: int, cores: int
) -> WorkerSpec:
    """The job of this pod: the document, overruled by what the launcher says in the environment.

    Raises InputError where a torchrun variable is no usable value or contradicts the document's node count.
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
    """Whether rank 0 runs in this pod; None where that is not known before the pods have met."""
    rendezvous = read_rendezvous_env(environ) or Rendezvous()
    return rendezvous.is_leader


def _process_count(config: RunConfig, environ: Mapping[str, str], gpus: int) -> int:
    """The launcher's count, else the document's, else one per GPU, else one: a process has all TPUs of its machine."""
    given = environ.get("PET_NPROC_PER_NODE", "auto")
    if given not in ("auto", "gpu", "cpu"):
        return max(1, env.number("PET_NPROC_PER_NODE", given))
    return config.launch.processes or max(1, gpus)


def launch_command(spec: WorkerSpec, rank_dir: Path) -> list[str]:
    """The command line of this pod's child; torchrun keeps its own files in `rank_dir`, which is temporary."""
    rank = ["-m", "podscale.launch.worker_main", spec.entry_module]
    if spec.single_process:
        return [sys.executable, *rank]
    if spec.uses_torchrun:
        return [sys.executable, "-m", "podscale.pytorch.torchrun", *_torchrun_options(spec, rank_dir), *rank]
    return [sys.executable, "-m", "podscale.launch.fork_launcher", *_fork_launcher_options(spec), spec.entry_module]


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
            [sys.executable, "-m", "podscale.launch.process_cleanup", *arguments],
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
