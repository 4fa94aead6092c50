"""Ranks of one stage in a pod, from the run document and the cluster's environment, and the start of their launcher.

The launcher is torchrun for PyTorch on several pods and `fork_launcher` otherwise. A single rank starts directly.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Literal

from podscale.config import RunConfig
from podscale.distributed.worker_env import RankEnv, WorkerEnv
from podscale.errors import InputError
from podscale.launch.process_cleanup import start_bound
from podscale.launch.rendezvous import Rendezvous
from podscale.util import env

WorkerStage = Literal["train", "evaluate"]


@dataclass(frozen=True)
class WorkerSpec:
    """Ranks of one stage in this pod; if `worker_module` is empty, they run the engine's worker module."""

    config: RunConfig
    stage: WorkerStage
    shard_set: str
    rendezvous: Rendezvous
    processes_per_node: int = 1
    threads_per_process: int = 1
    worker_module: str = ""

    @property
    def entry_module(self) -> str:
        return self.worker_module or f"podscale.{self.config.train.engine}.worker"

    @property
    def single_process(self) -> bool:
        return self.rendezvous.nodes * self.processes_per_node == 1

    @property
    def uses_torchrun(self) -> bool:
        """True if torchrun starts the ranks: for PyTorch on several pods, which it can restart together."""
        return self.config.train.engine == "pytorch" and self.rendezvous.nodes > 1

    def command(self, rank_dir: Path) -> list[str]:
        """Return the launcher's arguments to Python; torchrun writes its files to `rank_dir`, which is temporary."""
        rank = ["-m", "podscale.launch.worker_main", self.entry_module]
        if self.single_process:
            return rank
        if self.uses_torchrun:
            return ["-m", "podscale.pytorch.torchrun", *self._torchrun_options(rank_dir), *rank]
        return ["-m", "podscale.launch.fork_launcher", *self._fork_launcher_options(), self.entry_module]

    @property
    def shared_cache_bytes(self) -> int:
        """Bytes of decoded images that the ranks of this pod share; 0 for one rank."""
        return self.processes_per_node * self.config.input.decoded_cache_bytes if self.processes_per_node > 1 else 0

    def environment(
        self, worker_env: WorkerEnv, base: Mapping[str, str], decoded_cache: str | None = None
    ) -> dict[str, str]:
        """Return the launcher's environment: the variables of a worker on top of `base`.

        Args:
            decoded_cache: path of the memory for `shared_cache_bytes`; None: each rank has its own cache.
        """
        return {
            **base,
            env.DECODED_CACHE: decoded_cache or "",
            **worker_env.variables(),
            **(RankEnv().variables() if self.single_process else {}),
            env.SUPERVISOR: str(os.getpid()),
            env.PROGRESS_FILE: str(progress_path(worker_env.rank_directory, base)),
            env.OMP_NUM_THREADS: str(self.threads_per_process),
            # Versions of torchrun that read this variable wait this long before they kill the ranks. It is longer than
            # the grace period, after which the supervisor itself kills.
            env.TORCH_ELASTIC_SHUTDOWN_TIMEOUT: str(math.ceil(self.config.launch.grace_seconds) + 5),
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, worker_env: WorkerEnv, log: Path, decoded_cache: str | None) -> Popen[bytes]:
        """Start the launcher, with its output in `log`; it exits when this process exits."""
        command = self.command(worker_env.rank_directory)
        variables = self.environment(worker_env, os.environ, decoded_cache)
        with log.open("ab") as file:
            return start_bound(command, variables, stdin=DEVNULL, stdout=file.fileno(), stderr=STDOUT)

    def _fork_launcher_options(self) -> list[str]:
        rendezvous = self.rendezvous
        options: dict[str, object] = {
            "processes": self.processes_per_node,
            "nodes": rendezvous.nodes,
            "node-rank": rendezvous.node_rank,
            "slices": rendezvous.slices,
            "address": rendezvous.address if rendezvous.nodes > 1 else "127.0.0.1",
            "port": rendezvous.port if rendezvous.nodes > 1 else 0,
            "grace-seconds": self.config.launch.grace_seconds,
        }
        if not self.worker_module:
            options["preload"] = self.entry_module
        return [f"--{name}={value}" for name, value in options.items()]

    def _torchrun_options(self, rank_dir: Path) -> list[str]:
        """Return the options that are known here; torchrun reads the rest from the PET_* variables."""
        rendezvous = self.rendezvous
        options: dict[str, object] = {
            "nproc-per-node": self.processes_per_node,
            "log-dir": rank_dir / "torchrun",
            "max-restarts": self.config.launch.max_restarts,
        }
        if rendezvous.node_rank is not None:
            options |= {"nnodes": rendezvous.nodes, "node-rank": rendezvous.node_rank}
            options |= {"master-addr": rendezvous.address, "master-port": rendezvous.port}
        return [f"--{name}={value}" for name, value in options.items()]


def build_worker_spec(
    config: RunConfig, stage: WorkerStage, shard_set: str, environ: Mapping[str, str], *, gpus: int, cores: int
) -> WorkerSpec:
    """Return the ranks of this pod; the launcher's environment variables override the document.

    Raises:
        InputError: A launcher's variable is invalid, or is missing although the document has several nodes.
    """
    rendezvous = Rendezvous.read(environ)
    if rendezvous is None:
        if config.launch.nodes > 1:
            raise InputError(
                "several nodes need a launcher that sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and "
                "PET_MASTER_PORT in each pod",
                field="launch.nodes",
                got=config.launch.nodes,
                hint="On one machine use launch.nodes=1",
            )
        rendezvous = Rendezvous()
    processes = _process_count(config, environ, gpus)
    threads = config.launch.threads or max(1, cores // processes)
    return WorkerSpec(config, stage, shard_set, rendezvous, processes, threads)


def _process_count(config: RunConfig, environ: Mapping[str, str], gpus: int) -> int:
    """Return the launcher's count, else the document's, else one per GPU, else 1 (one process drives all TPUs)."""
    count = environ.get("PET_NPROC_PER_NODE", "auto")
    if count not in ("auto", "gpu", "cpu"):
        return max(1, env.number("PET_NPROC_PER_NODE", count))
    return config.launch.processes or max(1, gpus)


def progress_path(rank_dir: Path, base: Mapping[str, str]) -> Path:
    """Return the file for the progress of an evaluation: that of the parent command, or one in `rank_dir`."""
    return env.read_path(env.PROGRESS_FILE, base) or rank_dir / "progress.json"
