"""Does what a document asks for fit together, and the hardware it names? What no cluster is needed to see."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from pydantic_core import PydanticCustomError

from podscale.config import RunConfig
from podscale.config.checks import check_ranks
from podscale.config.preflight import cache_memory
from podscale.errors import InputError
from podscale.hardware import Hardware
from podscale.launch.demand import GIB, Demand
from podscale.order import check_groups
from podscale.rundir import local_path
from podscale.text import count


def find_misfits(
    config: RunConfig, stage: str, hardware: Hardware, nodes: int, processes: int, demand: Demand, shard_set: str | None
) -> None:
    """Raises one InputError with everything that does not fit. shard_set: None where volumes are not looked at."""
    found = [*_machine(config, stage, hardware, demand)]
    if shard_set is not None:
        found += [*_workspace(config), *_places(config, stage, shard_set)]
    if stage in ("train", "evaluate"):
        found += [*_accelerators(config, hardware, nodes, processes), *_security(config, hardware)]
    if stage == "train":
        drives_all = hardware.kind == "tpu" or (config.train.engine == "jax" and processes == 1)
        devices = max(hardware.accelerators, 1) if drives_all else processes
        found += [*_worlds(config, nodes, devices), *_caches(config, processes, demand)]
    if len(found) == 1:
        raise InputError(found[0])
    if found:
        raise InputError(
            "\n".join([f"this job cannot run; {len(found)} things to change:", *(f"  - {one}" for one in found)])
        )


def mounts(config: RunConfig) -> dict[str, bool]:
    """Paths at which the pods have a volume, and whether it can be written."""
    cluster = config.launch.cluster
    found = {
        volume.path: not volume.read_only and volume.kind not in ("secret", "config_map") for volume in cluster.volumes
    }
    if cluster.workspace_claim is not None:
        found[str(local_path(config.run.workspace))] = True
    return found


def _mounted(path: str, config: RunConfig) -> bool | None:
    """Whether the volume that holds `path` can be written; None where no volume does."""
    here = PurePosixPath(path)
    around = [(PurePosixPath(mount), writable) for mount, writable in mounts(config).items()]
    inside = [(len(mount.parts), writable) for mount, writable in around if here.is_relative_to(mount)]
    return max(inside)[1] if inside else None


def _workspace(config: RunConfig) -> Iterator[str]:
    workspace = str(local_path(config.run.workspace))
    if not workspace.startswith("/"):
        yield (
            f"run.workspace {config.run.workspace} is relative: give the path in the pods at which a volume is "
            "mounted, such as /workspace"
        )
        return
    writable = _mounted(workspace, config)
    if writable is None:
        yield (
            f"run.workspace {workspace}: no volume is mounted there; name a PersistentVolumeClaim with "
            "launch.cluster.workspace_claim, or a volume of launch.cluster.volumes with that path"
        )
    elif not writable:
        yield f"run.workspace {workspace}: the volume there is read-only; a run writes its directory into it"
    if config.launch.cluster.workspace_claim and any(
        PurePosixPath(volume.path) == PurePosixPath(workspace) for volume in config.launch.cluster.volumes
    ):
        yield f"launch.cluster.volumes has {workspace} too, where workspace_claim is mounted; leave one of them out"


def _places(config: RunConfig, stage: str, shard_set: str) -> Iterator[str]:
    """What the pods read must be on a volume."""
    source = config.data.source
    if stage == "shard" and source != "digits" and "://" not in source and _mounted(source, config) is None:
        yield (
            f"data.source {source}: no volume is mounted there; name one with launch.cluster.volumes, or give a gs:// "
            "or s3:// URL"
        )
    local = shard_set.removeprefix("file://")
    if stage != "shard" and local.startswith("/") and "://" not in local and _mounted(local, config) is None:
        yield f"shard set {shard_set}: no volume is mounted there; name one with launch.cluster.volumes"


def _machine(config: RunConfig, stage: str, hardware: Hardware, demand: Demand) -> Iterator[str]:
    if hardware.cpus and demand.cpus >= hardware.cpus:
        yield (
            f"launch.resources.cpus {demand.cpus:g}: a {hardware.machine} has {hardware.cpus} and needs some itself; "
            f"lower it, or set it to 0 for {hardware.cpus_to_ask:g}"
        )
    if hardware.memory_gib and demand.memory >= hardware.memory_gib:
        yield (
            f"launch.resources.memory_gib {demand.memory:g}: a {hardware.machine} has {hardware.memory_gib:g} and "
            f"needs some itself; lower it, or set it to 0 for {hardware.memory_to_ask:g}"
        )
    if demand.memory and demand.shm >= demand.memory:
        yield (
            f"launch.resources.memory_gib {demand.memory:g}: shared memory for the batches in flight is part of it and "
            f"takes {demand.shm:g}; raise it, or lower input.prefetch, input.workers or launch.processes"
        )


def _caches(config: RunConfig, processes: int, demand: Demand) -> Iterator[str]:
    caches = cache_memory(config, processes) / GIB
    if caches and demand.memory and caches + demand.shm >= demand.memory:
        yield (
            f"launch.resources.memory_gib {demand.memory:g}: input.record_cache_bytes and input.decoded_cache_bytes "
            f"of {count(processes, 'process')} take {caches:.3g} of it; raise it, or lower them"
        )


def _accelerators(config: RunConfig, hardware: Hardware, nodes: int, processes: int) -> Iterator[str]:
    launch = config.launch
    if hardware.kind == "gpu" and processes > hardware.accelerators:
        yield (
            f"launch.processes {processes}: {hardware.name} gives each pod {hardware.accelerators}; set it to "
            f"{hardware.accelerators}, or 0"
        )
    if hardware.kind == "tpu" and processes > 1:
        yield f"launch.processes {processes}: one process drives all chips of a TPU machine; set launch.processes to 1"
    if hardware.hosts > 1 and launch.nodes not in (1, nodes):
        yield (
            f"launch.nodes {launch.nodes}: {launch.cluster.slices} x {hardware.name} are {nodes} machines; leave "
            "launch.nodes out"
        )
    if launch.cluster.slices > 1 and hardware.hosts == 1:
        yield f"launch.cluster.slices {launch.cluster.slices}: only TPU slices of several machines go together"
    if launch.cluster.min_nodes is not None and hardware.kind == "tpu":
        yield "launch.cluster.min_nodes: a TPU slice runs whole or not at all; leave it out"


def _security(config: RunConfig, hardware: Hardware) -> Iterator[str]:
    cluster = config.launch.cluster
    if cluster.network == "gpudirect" and hardware.direct is None:
        yield (
            f"launch.cluster.network gpudirect: {hardware.name} has none; it comes with whole machines of eight H100, "
            "H200 or B200. Set network to plain, or another launch.hardware"
        )
    if cluster.security != "privileged":
        for volume in cluster.volumes:
            if volume.nfs is not None:
                yield (
                    f"launch.cluster.volumes {volume.path}: restricted Pod Security allows no NFS volume in a pod; "
                    "make it a PersistentVolume and give its claim"
                )


def _worlds(config: RunConfig, nodes: int, devices: int) -> Iterator[str]:
    """Every number of nodes that the job may run on must fit the global batch, and all of them the groups of shards.

    devices: of each of them.
    """
    least = config.launch.cluster.min_nodes or nodes
    for number in range(least, nodes + 1):
        try:
            check_ranks(config, number * devices)
        except PydanticCustomError as error:
            yield error.message() + (f" (with {number} of launch.nodes={nodes} nodes)" if number < nodes else "")
    try:
        check_groups(config, nodes)
    except InputError as error:
        yield str(error)
