"""Resources of a pod, and checks of a job against its document and hardware that need no cluster."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath

from podscale.config import RunConfig
from podscale.config.preflight.host import input_cache_bytes, shared_memory_bytes
from podscale.config.ranks import check_ranks
from podscale.data.shard_groups import check_shard_groups
from podscale.errors import InputError, combine_errors
from podscale.hardware import Hardware
from podscale.runs import local_path
from podscale.util.formatting import format_count
from podscale.util.locations import Location

GIB = 2**30
TEMPORARY_GIB = 8.0
"""Default disk space for /tmp (compiled kernels, torchrun's files) and the container's log, GiB."""
MIN_SHM_GIB = 1.0
"""Shared memory for buffers of NCCL and the driver, in addition to that of the loaders, GiB."""
GPUDIRECT_SHM_GIB = 128.0
"""Shared memory that xpk mounts for GPUDirect, GiB (src/xpk/core/workload_decorators/tcpxo_decorator.py)."""
REPORT_CPUS, REPORT_MEMORY_GIB = 4.0, 16.0
"""Maximal resources of the report stage, which is one process."""


@dataclass(frozen=True)
class Amount:
    """Cores and memory of a pod; 0 names none."""

    cpus: float
    memory_gib: float


CPU_REQUEST = Amount(0.25, 1.0)
"""Default request of each process on machines without accelerators: a small training on a laptop's cluster."""
CPU_LIMIT = Amount(4.0, 8.0)
"""Default limit of each process there; a pod uses more than it requests if its node has it free."""
SHARD_PROCESSES = 4
"""Processes that the default limit of the shard stage counts, if launch.shard_workers leaves them to the machine."""


@dataclass(frozen=True)
class PodResources:
    """Resources of one pod: its limits and its request, in cores and GiB. `shm_gib` is a part of `memory_gib`."""

    cpus: float
    memory_gib: float
    request: Amount
    shm_gib: float
    temporary_gib: float
    cache_gib: float
    resource: str | None = None
    accelerators: int = 0

    @property
    def ephemeral_gib(self) -> float:
        return self.temporary_gib + self.cache_gib


def pod_resources(
    config: RunConfig, stage: str, hardware: Hardware, processes: int, *, cached: bool, gpudirect: bool
) -> PodResources:
    """Return the resources that the document names, else the hardware's; if `cached`, add disk for remote shards."""
    resources = config.launch.resources
    cpus, memory = resources.cpus or hardware.cpus_to_request, resources.memory_gib or hardware.memory_gib_to_request
    if stage == "report":
        cpus, memory = min(cpus, REPORT_CPUS), min(memory, REPORT_MEMORY_GIB)
    shm = resources.shm_gib or _shm_gib(config, stage, processes, memory, gpudirect=gpudirect)
    request, limit = Amount(cpus, memory), Amount(cpus, memory)
    if hardware.kind == "cpu":
        small, large = _cpu_defaults(config, stage, processes, shm)
        request = Amount(cpus or small.cpus, memory or small.memory_gib)
        limit = Amount(cpus or large.cpus, memory or large.memory_gib)
    return PodResources(
        cpus=limit.cpus,
        memory_gib=limit.memory_gib,
        request=request,
        shm_gib=shm,
        temporary_gib=resources.ephemeral_gib or TEMPORARY_GIB,
        cache_gib=math.ceil(config.input.cache_bytes / GIB) if cached else 0.0,
        resource=hardware.resource,
        accelerators=hardware.accelerators,
    )


def _cpu_defaults(config: RunConfig, stage: str, processes: int, shm_gib: float) -> tuple[Amount, Amount]:
    """Return request and limit of a pod on a machine without accelerators, whose size is unknown.

    Both are always set, because a namespace with a quota on them refuses pods without them.
    """
    has_ranks = stage in ("train", "evaluate")
    counted = processes if has_ranks else 1
    most = (config.launch.shard_workers or SHARD_PROCESSES) if stage == "shard" else counted
    caches = math.ceil(input_cache_bytes(config, processes) / GIB) if has_ranks else 0
    request = Amount(counted * CPU_REQUEST.cpus, counted * CPU_REQUEST.memory_gib + caches)
    return request, Amount(most * CPU_LIMIT.cpus, most * CPU_LIMIT.memory_gib + caches + shm_gib)


def _shm_gib(config: RunConfig, stage: str, processes: int, memory: float, *, gpudirect: bool) -> float:
    """Return twice the size of the batches in flight (they are copied while new ones are filled), plus NCCL's part."""
    if stage not in ("train", "evaluate"):
        return MIN_SHM_GIB if not memory else min(MIN_SHM_GIB, memory / 2)
    batches = math.ceil(2 * shared_memory_bytes(config, processes) / GIB) + MIN_SHM_GIB
    return max(batches, min(GPUDIRECT_SHM_GIB, memory / 2)) if gpudirect else batches


def validate_job(
    config: RunConfig,
    stage: str,
    hardware: Hardware,
    nodes: int,
    processes: int,
    resources: PodResources,
    shard_set: str | None,
) -> None:
    """Raise InputError (InputErrors for several) if the job cannot run; without a `shard_set`, do not check volumes."""
    errors = [*_check_machine(config, stage, hardware, resources)]
    if shard_set is not None:
        errors += [*_check_workspace(config), *_check_input_paths(config, stage, shard_set)]
    if stage in ("train", "evaluate"):
        errors += [*_check_accelerators(config, hardware, nodes, processes), *_check_security(config, hardware)]
    if stage == "train":
        is_multi_device = hardware.kind == "tpu" or (config.train.engine == "jax" and processes == 1)
        devices = max(hardware.accelerators, 1) if is_multi_device else processes
        errors += [*_check_world_sizes(config, nodes, devices), *_check_caches(config, processes, resources)]
    if errors:
        raise combine_errors(errors, "this job cannot run")


def volume_mounts(config: RunConfig) -> dict[str, bool]:
    """Return the paths at which the pods have a volume, and whether each is writable."""
    cluster = config.launch.cluster
    writable = {
        volume.path: not volume.read_only and volume.kind not in ("secret", "config_map") for volume in cluster.volumes
    }
    if cluster.workspace_claim is not None:
        writable[str(local_path(config.run.workspace))] = True
    return writable


def _is_writable(path: PurePath, config: RunConfig) -> bool | None:
    """Return whether the volume mounted at or above `path` is writable; None if there is none."""
    mounts = [(PurePosixPath(mount), writable) for mount, writable in volume_mounts(config).items()]
    around = [(mount, writable) for mount, writable in mounts if path.is_relative_to(mount)]
    return max(around)[1] if around else None


def _check_workspace(config: RunConfig) -> Iterator[InputError]:
    key, path = "run.workspace", local_path(config.run.workspace)
    workspace = str(path)
    if not path.is_absolute():
        hint = "Give the path in the pods at which a volume is mounted, such as /workspace"
        yield InputError("not an absolute path", field=key, got=config.run.workspace, hint=hint)
        return
    writable = _is_writable(path, config)
    if writable is None:
        yield InputError(
            "no volume is mounted there",
            field=key,
            got=workspace,
            hint="Name a PersistentVolumeClaim with launch.cluster.workspace_claim, or a volume of "
            "launch.cluster.volumes with that path.",
        )
    elif not writable:
        hint = "A run writes to its workspace: mount a writable volume."
        yield InputError("the volume there is read-only", field=key, got=workspace, hint=hint)
    if config.launch.cluster.workspace_claim and any(
        PurePosixPath(volume.path) == PurePosixPath(workspace) for volume in config.launch.cluster.volumes
    ):
        yield InputError(
            "launch.cluster.workspace_claim is also mounted at this path",
            field="launch.cluster.volumes",
            got=workspace,
            hint="Remove one of them.",
        )


def _check_input_paths(config: RunConfig, stage: str, shard_set: str) -> Iterator[InputError]:
    """Yield an error if the stage's input is on no volume."""
    problem, source = "no volume is mounted there", config.data.source
    path = Location.parse(source if stage == "shard" else shard_set).local_path
    if path is None or _is_writable(path, config) is not None:
        return
    if stage == "shard" and config.data.source_is_location:
        hint = "Name one with launch.cluster.volumes, or give a gs:// or s3:// URL."
        yield InputError(problem, field="data.source", got=source, hint=hint)
    elif stage != "shard" and path.is_absolute():
        yield InputError(problem, field="shard set", got=shard_set, hint="Name one with launch.cluster.volumes.")


def _check_machine(config: RunConfig, stage: str, hardware: Hardware, resources: PodResources) -> Iterator[InputError]:
    if hardware.cpus and resources.cpus >= hardware.cpus:
        yield InputError(
            f"a {hardware.machine} has {hardware.cpus} and needs some for the system",
            field="launch.resources.cpus",
            got=resources.cpus,
            hint=f"Lower it, or set it to 0 for {hardware.cpus_to_request:g}.",
        )
    if hardware.memory_gib and resources.memory_gib >= hardware.memory_gib:
        yield InputError(
            f"a {hardware.machine} has {hardware.memory_gib:g} GiB and needs some for the system",
            field="launch.resources.memory_gib",
            got=resources.memory_gib,
            hint=f"Lower it, or set it to 0 for {hardware.memory_gib_to_request:g}.",
        )
    if resources.memory_gib and resources.shm_gib >= resources.memory_gib:
        yield InputError(
            f"shared memory for the batches in flight is part of it and takes {resources.shm_gib:g}",
            field="launch.resources.memory_gib",
            got=resources.memory_gib,
            hint="Raise it, or lower input.prefetch, input.workers or launch.processes.",
        )


def _check_caches(config: RunConfig, processes: int, resources: PodResources) -> Iterator[InputError]:
    caches = input_cache_bytes(config, processes) / GIB
    if caches and resources.memory_gib and caches + resources.shm_gib >= resources.memory_gib:
        yield InputError(
            f"input.record_cache_bytes and input.decoded_cache_bytes of {format_count(processes, 'process')} take "
            f"{caches:.3g} of it",
            field="launch.resources.memory_gib",
            got=resources.memory_gib,
            hint="Raise it, or lower the caches.",
        )


def _check_accelerators(config: RunConfig, hardware: Hardware, nodes: int, processes: int) -> Iterator[InputError]:
    launch = config.launch
    if hardware.kind == "gpu" and processes > hardware.accelerators:
        yield InputError(
            f"{hardware.name} gives each pod {hardware.accelerators}",
            field="launch.processes",
            got=processes,
            hint=f"Set it to {hardware.accelerators}, or 0.",
        )
    if hardware.kind == "tpu" and processes > 1:
        problem = "one process drives all chips of a TPU machine"
        yield InputError(problem, field="launch.processes", got=processes, hint="Set it to 1.")
    if hardware.hosts > 1 and launch.nodes not in (1, nodes):
        problem = f"{launch.cluster.slices} x {hardware.name} are {nodes} machines"
        yield InputError(problem, field="launch.nodes", got=launch.nodes, hint="Leave it out.")
    if launch.cluster.slices > 1 and hardware.hosts == 1:
        problem = "only TPU slices of several machines can be combined"
        yield InputError(problem, field="launch.cluster.slices", got=launch.cluster.slices)
    if launch.cluster.min_nodes is not None and hardware.kind == "tpu":
        problem = "a TPU slice cannot run with fewer machines"
        yield InputError(problem, field="launch.cluster.min_nodes", got=launch.cluster.min_nodes, hint="Leave it out.")


def _check_security(config: RunConfig, hardware: Hardware) -> Iterator[InputError]:
    cluster = config.launch.cluster
    if cluster.network == "gpudirect" and hardware.gpudirect is None:
        yield InputError(
            f"{hardware.name} has no GPUDirect; machines with eight H100, H200 or B200 have it",
            field="launch.cluster.network",
            got=cluster.network,
            hint="Set it to plain, or set another launch.hardware.",
        )
    if cluster.security != "privileged":
        for volume in cluster.volumes:
            if volume.nfs is not None:
                yield InputError(
                    "restricted Pod Security does not allow NFS volumes in a pod",
                    field="launch.cluster.volumes",
                    got=volume.path,
                    hint="Make it a PersistentVolume and give its claim.",
                )


def _check_world_sizes(config: RunConfig, nodes: int, devices: int) -> Iterator[InputError]:
    """Yield the errors for each number of nodes with which an elastic job may run; `devices` are per node."""
    for number in range(config.launch.cluster.min_nodes or nodes, nodes + 1):
        try:
            check_ranks(config, number * devices)
        except InputError as refused:
            of = f" (with {number} of launch.nodes={nodes} nodes)" if number < nodes else ""
            yield InputError(refused.problem + of, field=refused.field, got=refused.got, hint=refused.hint)
    try:
        check_shard_groups(config, nodes)
    except InputError as error:
        yield error
