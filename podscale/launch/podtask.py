"""What one pod of a job carries out: its part of one stage, by the document and by what its launcher says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.launch.rendezvous import Rendezvous, read_rendezvous_env
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
        return self.worker_module or f"podscale.{self.engine}.rank"

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
