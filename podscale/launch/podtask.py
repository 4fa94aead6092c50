"""What one pod of a job carries out: its part of one stage, by the document and by what its launcher says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from podscale.config import RunConfig
from podscale.errors import InputError

Stage = Literal["train", "evaluate"]
SLICE, SLICE_NODES = "PODSCALE_SLICE", "PODSCALE_SLICE_NODES"
"""Environment: number of this pod's slice, and pods of each slice."""
C10D_PORT = 29400
"""Where torchrun's c10d rendezvous is when its endpoint names no port."""


@dataclass(frozen=True)
class Rendezvous:
    """How the pods of a job meet. node_rank is None where only the rendezvous decides it (elastic c10d)."""

    nodes: int = 1
    node_rank: int | None = 0
    address: str = ""
    port: int = 0

    @property
    def leads(self) -> bool | None:
        """Whether rank 0 runs in this pod; None where that is not known before the pods have met."""
        return None if self.node_rank is None else self.node_rank == 0


@dataclass(frozen=True)
class PodTask:
    """One stage of one run on `nodes` pods with `processes` ranks each; `threads` CPU threads a rank."""

    run: str
    stage: Stage
    shard_set: str
    document: str
    """The resolved run document as JSON."""
    rendezvous: Rendezvous
    processes: int
    threads: int
    grace_seconds: float
    max_restarts: int
    rank_module: str = "podscale.pytorch.rank"

    @property
    def world_size(self) -> int:
        return self.rendezvous.nodes * self.processes

    @property
    def alone(self) -> bool:
        """One process on one node: nobody to meet, so no torchrun."""
        return self.world_size == 1

    @property
    def leads(self) -> bool | None:
        """As the rendezvous' own."""
        return self.rendezvous.leads


def pod_task(
    config: RunConfig, stage: Stage, shard_set: str, environment: Mapping[str, str], *, gpus: int, cores: int
) -> PodTask:
    """The job of this pod: the document, overruled by what the launcher says in the environment.

    Raises InputError where a torchrun variable is no usable value or contradicts the document's node count.
    """
    rendezvous = read_rendezvous(environment)
    if rendezvous is None:
        if config.launch.nodes > 1:
            raise InputError(
                f"launch.nodes is {config.launch.nodes}, but nothing here says how the nodes meet: PET_NNODES, "
                "PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT are not set. A launcher sets them in each pod; "
                "on one machine use launch.nodes=1"
            )
        rendezvous = Rendezvous()
    processes = _processes(config, environment, gpus)
    return PodTask(
        run=config.run.id,
        stage=stage,
        shard_set=shard_set,
        document=config.model_dump_json(),
        rendezvous=rendezvous,
        processes=processes,
        threads=config.launch.threads or max(1, cores // processes),
        grace_seconds=config.launch.grace_seconds,
        max_restarts=config.launch.max_restarts,
    )


def pod_leads(environment: Mapping[str, str]) -> bool | None:
    """Whether rank 0 runs in this pod; None where that is not known before the pods have met."""
    rendezvous = read_rendezvous(environment) or Rendezvous()
    return rendezvous.leads


def read_rendezvous(environment: Mapping[str, str]) -> Rendezvous | None:
    """The meeting place of the pods; None if this one is alone.

    From torchrun's PET_* variables, as the training operator and our manifests set them, else from those of a JAXJob,
    else from WORLD_SIZE and RANK counted in pods, which older launchers set. Where the pods are those of several
    slices, PODSCALE_SLICE and PODSCALE_SLICE_NODES say which of them PET_NODE_RANK counts within.
    """
    if "PET_NNODES" in environment:
        nodes = _number("PET_NNODES", environment["PET_NNODES"].rpartition(":")[2])
        rank = environment.get("PET_NODE_RANK")
        elastic = "PET_RDZV_ENDPOINT" in environment
        node_rank = _number("PET_NODE_RANK", rank) if rank is not None and not elastic else None
        if node_rank is not None and SLICE in environment:
            node_rank += _number(SLICE, environment[SLICE]) * _number(SLICE_NODES, environment.get(SLICE_NODES, ""))
        address, port = environment.get("PET_MASTER_ADDR", ""), environment.get("PET_MASTER_PORT", "0")
        if elastic:
            endpoint = environment["PET_RDZV_ENDPOINT"]
            address, colon, port = endpoint.rpartition(":")
            address, port = (address, port) if colon else (endpoint, str(C10D_PORT))
        node_rank = 0 if nodes == 1 else node_rank
    elif "COORDINATOR_ADDRESS" in environment and "PROCESS_ID" in environment:
        nodes = _number("NUM_PROCESSES", environment.get("NUM_PROCESSES", ""))
        node_rank = _number("PROCESS_ID", environment["PROCESS_ID"])
        address, port = environment["COORDINATOR_ADDRESS"], environment.get("COORDINATOR_PORT", "0")
    elif "WORLD_SIZE" in environment and "RANK" in environment and "LOCAL_RANK" not in environment:
        nodes = _number("WORLD_SIZE", environment["WORLD_SIZE"])
        node_rank = _number("RANK", environment["RANK"])
        address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "0")
    else:
        return None
    if nodes < 1 or (node_rank is not None and not 0 <= node_rank < nodes):
        raise InputError(f"the launcher says node {node_rank} of {nodes}: check PET_NODE_RANK and PET_NNODES")
    return Rendezvous(nodes, node_rank, address, _number("PET_MASTER_PORT", port))


def _processes(config: RunConfig, environment: Mapping[str, str], gpus: int) -> int:
    """The launcher's count, else the document's, else one per GPU, else one."""
    given = environment.get("PET_NPROC_PER_NODE", "auto")
    if given not in ("auto", "gpu", "cpu"):
        return max(1, _number("PET_NPROC_PER_NODE", given))
    return config.launch.processes or max(1, gpus)


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name}={text}: the launcher must give a whole number") from None
