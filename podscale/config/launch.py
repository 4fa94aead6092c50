"""Who starts the processes of a run, on how many machines of which kind."""

from typing import Literal

from pydantic import model_validator

from podscale.config.cluster import ClusterSection
from podscale.config.conflict import conflict_error
from podscale.config.fields import placement_field
from podscale.config.section import Section


class ResourcesSection(Section):
    """What one pod of the pipeline asks a cluster for; 0 and null ask for nothing, or for what the hardware has."""

    cpus: float = placement_field(0.0, "CPU cores per pod.", ge=0)
    memory_gib: float = placement_field(0.0, "Memory per pod in GiB.", ge=0)
    accelerator: str | None = placement_field(None, "Resource name of the accelerators, such as nvidia.com/gpu.")
    accelerators: int = placement_field(0, "Accelerators per pod of training and evaluation.", ge=0)
    ephemeral_gib: float = placement_field(
        0.0, "Space per pod for temporary files and logs in GiB; 0 = 8, and as much as the shard cache besides.", ge=0
    )
    shm_gib: float = placement_field(
        0.0, "Shared memory (/dev/shm) per pod in GiB, part of its memory; 0 = what loaders and NCCL need.", ge=0
    )

    @model_validator(mode="after")
    def _accelerators_named(self) -> "ResourcesSection":
        if self.accelerators and self.accelerator is None:
            raise conflict_error("accelerator", f"name the resource of the {self.accelerators} accelerators", got=None)
        return self

    @model_validator(mode="after")
    def _shared_memory_fits(self) -> "ResourcesSection":
        if self.memory_gib and self.shm_gib >= self.memory_gib:
            raise conflict_error(
                "shm_gib",
                f"part of the pod's memory, and leaves nothing of memory_gib={self.memory_gib:g}",
                got=self.shm_gib,
            )
        return self


class LaunchSection(Section):
    backend: Literal["local", "pytorchjob", "jaxjob", "trainjob", "jobset", "auto"] = placement_field(
        "local",
        "Who starts the processes: this machine, or the kind of job on a cluster. `auto`: by what the cluster has and "
        "the hardware asks for.",
    )
    hardware: str | None = placement_field(
        None,
        "Kind of machine on a cluster, such as `nvidia-h100-80gb x8` (GPUs per pod), `nvidia-l4`, `tpu-v5e-4x4` or "
        "`cpu` (docs/hardware.md); default: what launch.resources says.",
    )
    processes: int = placement_field(
        0, "Training processes per node; 0 = one per GPU, or one where there is none.", ge=0
    )
    nodes: int = placement_field(1, "Nodes of the job.", ge=1)
    threads: int = placement_field(0, "CPU threads per process; 0 = cores / processes.", ge=0)
    shard_workers: int = placement_field(0, "Packing processes; 0 = one per core.", ge=0)
    shard_pods: int = placement_field(1, "Pods that make the shard set together, where a cluster does it.", ge=1)
    max_restarts: int = placement_field(0, "Restarts from the newest checkpoint after a lost rank, per launch.", ge=0)
    grace_seconds: float = placement_field(
        60.0, "Time to save after a stop request, before processes are killed.", gt=0
    )
    timeout_seconds: float = placement_field(
        300.0, "Longest wait of one rank for its peers; then all end and name the missing one.", gt=0
    )
    hang_seconds: float = placement_field(
        180.0,
        "Least time without an update that counts as a hang: more where ten times the usual update is more, at most "
        "launch.timeout_seconds. Never during an evaluation, a checkpoint or the first update.",
        gt=0,
    )
    image: str = placement_field(
        "podscale-base:latest",
        "Container image of the stages: podscale-base, podscale-gpu, podscale-tpu ...",
        min_length=1,
    )
    launcher_image: str = placement_field(
        "podscale-tools:latest", "Container image of what only launches and waits on a cluster.", min_length=1
    )
    retries: int = placement_field(2, "Times a pipeline on a cluster starts a failed stage again.", ge=0)
    time_limit_hours: float = placement_field(
        168.0, "Longest time a stage on a cluster may take, retries included.", gt=0
    )
    resources: ResourcesSection = ResourcesSection()
    cluster: ClusterSection = ClusterSection()

    @model_validator(mode="after")
    def _elastic_within(self) -> "LaunchSection":
        least = self.cluster.min_nodes
        if least is not None and least > self.nodes:
            raise conflict_error("cluster.min_nodes", f"more than launch.nodes={self.nodes}", got=least)
        return self
