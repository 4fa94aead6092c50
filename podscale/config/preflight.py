"""Can this document run at this place? Everything that needs files, devices or ports, before anything is started."""

import errno
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic_core import PydanticCustomError

from podscale import devices, env
from podscale.config.checks import check_ranks
from podscale.config.engines import TPU, wants_tpus
from podscale.config.identity import data_fingerprint
from podscale.config.run_config import RunConfig
from podscale.errors import InputError
from podscale.text import human_bytes

Place = Literal["here", "containers", "pod", "job", "cluster"]

LISTED_FILES = 20_000
"""Files of a source folder that are measured to estimate the space of its shards; more would take too long."""
PROCESS_BYTES = 200 * 2**20
"""A training process takes at least this much memory before it holds any array."""
ENGINES = {"podscale-base": "pytorch", "podscale-gpu": "pytorch", "podscale-tpu": "jax"}
"""What our images train with (see images/)."""
SPARE_BYTES = 64 * 2**20
"""Space beyond the shards: index, report, logs."""


def preflight(document: RunConfig, place: Place, shard_set: str | None = None) -> None:
    """Raises one InputError that lists every problem found.

    place: `here` is this machine with everything on it, `containers` the same with the software of an image, `pod` is
    one pod of a job (its launcher says how many nodes there are), `cluster` is a cluster seen from outside: only what
    the document alone shows is checked; `job` the same for a job, whose launcher counts the ranks of each pod.
    shard_set: where a stage that needs no source reads its shards; default: the shards are still to be made (in a pod:
    by that pod, which then need not be fit for training).
    """
    problems = find_problems(document, place, shard_set)
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        listing = "\n".join(f"  - {problem}" for problem in problems)
        raise InputError(f"this run cannot start; {len(problems)} things to change:\n{listing}")


def find_problems(document: RunConfig, place: Place, shard_set: str | None = None) -> list[str]:
    """The problems as sentences, each with what to do; empty where the run can start."""
    if place == "cluster":
        return [*_cluster_problems(document), *_rank_problems(document)]
    if place == "job":
        return list(_cluster_problems(document))
    counts = shard_set_counts(document, shard_set)
    images = _source_problems(document) if shard_set is None else _shard_set_problems(shard_set, counts)
    found = [*images, *_workspace_problems(document)]
    if place == "pod" and shard_set is None:
        return found  # this pod makes shards: it trains nothing
    if place != "containers":
        found += _software_problems(document)
    found += [*_device_problems(document, place), *_port_problems(document), *_data_problems(document, counts)]
    return found


def processes_per_node(document: RunConfig) -> int:
    """Training processes on this node: as the document says, else one per GPU, else one."""
    return document.launch.processes or devices.default_processes()


def devices_here(document: RunConfig) -> int:
    """Devices that the engine will compute on in this machine, where processes drive several; 0 where not."""
    if document.train.engine == "pytorch":
        return 0
    processes = processes_per_node(document)
    simulated = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    gpus = devices.visible_gpus() if processes == 1 else 0  # of several processes each takes one
    return len(devices.tpu_chips()) or gpus or processes * (int(simulated[1]) if simulated else 0)


def local_directory(location: str) -> Path | None:
    """The path of a local location; None for an object store."""
    if location.startswith("file://"):
        return Path(location.removeprefix("file://"))
    return None if "://" in location else Path(location)


def _cluster_problems(document: RunConfig) -> Iterator[str]:
    workspace = local_directory(document.run.workspace)
    if workspace is not None and not workspace.is_absolute():
        yield (
            f"run.workspace {document.run.workspace} is relative: every pod would look somewhere else; give the path "
            "where the shared volume is mounted in the pods, such as /workspace"
        )
    source = local_directory(document.data.source)
    if source is not None and document.data.source != "digits" and not source.is_absolute():
        yield f"data.source {document.data.source} is relative: give the path inside the pods, or a gs:// or s3:// URL"
    yield from _engine_problems(document)
    yield from _image_problems(document)


def _image_problems(document: RunConfig) -> Iterator[str]:
    """One of our images, wherever it lies, that is without the engine. What others hold is not known here."""
    image, engine = document.launch.image, document.train.engine
    name = re.split("[:@]", image.rpartition("/")[2])[0]
    if name in ENGINES and ENGINES[name] != engine:
        fitting = "podscale-tpu" if engine == "jax" else "podscale-base or podscale-gpu"
        yield f"launch.image {image}: that image is without the engine of train.engine={engine}; name {fitting}"


def _engine_problems(document: RunConfig) -> Iterator[str]:
    """Hardware that the engine does not compute on."""
    hardware = document.launch.hardware or document.launch.resources.accelerator
    if wants_tpus(document) and document.train.engine == "pytorch":
        yield f"launch.hardware {hardware}: the PyTorch engine trains on GPUs and CPUs; set train.engine=jax for TPUs"


def _rank_problems(document: RunConfig) -> Iterator[str]:
    hardware, resources = document.launch.hardware, document.launch.resources
    if not document.launch.processes and hardware is None and not resources.accelerators:
        yield "launch.processes is 0 (one per GPU of whichever node it lands on): say how many, so that pods are alike"


def _source_problems(document: RunConfig) -> Iterator[str]:
    source = local_directory(document.data.source)
    if document.data.source == "digits" or source is None or shard_set_counts(document):
        return
    try:
        is_folder = source.is_dir()
        if is_folder and not os.access(source, os.R_OK | os.X_OK):
            yield f"data.source {source}: this user may not read it"
        elif is_folder and next(source.iterdir(), None) is None:
            yield f"data.source {source}: the folder is empty; it must hold one folder per class (or train/ and val/)"
        elif not is_folder and not source.exists():
            parent = next(p for p in source.absolute().parents if p.exists())
            yield f"data.source {source}: does not exist (nearest existing folder: {parent}); set data.source=<folder>"
    except OSError as error:
        yield f"data.source {source}: cannot be read: {error.strerror}"


def _shard_set_problems(shard_set: str, counts: dict[str, int]) -> Iterator[str]:
    if local_directory(shard_set) is not None and not counts:
        yield f"{shard_set}: no complete shard set here; run `podscale shard`, or name another with --shard-set"


def _workspace_problems(document: RunConfig) -> Iterator[str]:
    workspace = local_directory(document.run.workspace)
    if workspace is None:
        yield (
            f"run.workspace {document.run.workspace}: a run directory needs a local or mounted file system; mount the "
            "bucket and give its path"
        )
        return
    existing = next((p for p in (workspace.absolute(), *workspace.absolute().parents) if p.exists()), Path("/"))
    if not existing.is_dir():
        yield f"run.workspace {workspace}: {existing} is a file; choose another run.workspace"
        return
    if os.statvfs(existing).f_flag & os.ST_RDONLY or not os.access(existing, os.W_OK | os.X_OK):
        yield f"run.workspace {workspace}: {existing} cannot be written; choose another run.workspace"
        return
    needed = _space_needed(document)
    free = shutil.disk_usage(existing).free
    if free < needed:
        yield (
            f"run.workspace {workspace}: {human_bytes(free)} free, about {human_bytes(needed)} needed; "
            "free some space or choose another run.workspace"
        )


def _space_needed(document: RunConfig) -> int:
    """Bytes the run will at least write: copies of the source's images, where they are not there yet."""
    if shard_set_counts(document):
        return SPARE_BYTES
    source = local_directory(document.data.source)
    if source is None or document.data.source == "digits":
        return SPARE_BYTES
    return SPARE_BYTES + (0 if document.data.resize_short else _measure(source))


def _measure(source: Path) -> int:
    """Bytes of a file, or of the first files of a folder."""
    if source.is_file():
        return source.stat().st_size
    total = seen = 0
    for directory, _, names in os.walk(source):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size  # noqa: PTH118, a Path per file is slow
            except OSError:
                continue
            seen += 1
            if seen >= LISTED_FILES:
                return total
    return total


def _software_problems(document: RunConfig) -> Iterator[str]:
    yield from _jax_problems(document) if document.train.engine == "jax" else _pytorch_problems()
    if document.input.loader == "dali" and not has_dali():
        advice = _where_from("pip install 'podscale[gpu]'", "podscale-gpu")
        yield f"input.loader=dali: DALI is not installed: {advice}, or set input.loader=torchvision"
    yield from _tracker_problems(document)


def _pytorch_problems() -> Iterator[str]:
    for module in ("torch", "torchvision"):
        if find_spec(module) is None:
            advice = _where_from("pip install 'podscale[torch]'", "podscale-base or podscale-gpu")
            yield f"the PyTorch engine needs {module}, which is not installed: {advice}"


def _jax_problems(document: RunConfig) -> Iterator[str]:
    """A machine with TPUs whose library is missing would train on its CPU, unnoticed."""
    advice = _where_from("pip install 'jax[tpu]' on a TPU host, 'podscale[tpu]' elsewhere", "podscale-tpu")
    if find_spec("jax") is None:
        yield f"the JAX engine needs jax, which is not installed: {advice}"
    elif find_spec("libtpu") is None and (devices.tpu_chips() or wants_tpus(document)):
        yield f"libtpu is not installed, without which JAX does not find the TPUs of this machine: {advice}"
    if wants_tpus(document) and not devices.tpu_chips():
        yield (
            f"launch.hardware {document.launch.hardware or TPU}: this machine has no TPU; leave it out to train on "
            "what is here, or submit the run to a cluster"
        )


def _tracker_problems(document: RunConfig) -> Iterator[str]:
    for name in ("wandb", "mlflow"):
        if name in document.telemetry.trackers and not _is_installed(name):
            advice = _where_from(f"pip install 'podscale[{name}]'", f"one of your own on top of it that adds {name}")
            yield f"telemetry.trackers names {name}, which is not installed: {advice}, or remove it"
    section = document.telemetry.mlflow
    if "mlflow" in document.telemetry.trackers and not (section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")):
        yield (
            "telemetry.trackers names mlflow, but nothing says where that is: set telemetry.mlflow.tracking_uri or "
            "MLFLOW_TRACKING_URI (in pods: launch.cluster.env), or remove it"
        )


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a folder of that name (wandb leaves one where it is used) is no package."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def _where_from(install: str, images: str) -> str:
    """What to do about missing software: nothing can be installed into a container, which has another image."""
    inside = os.environ.get(env.IMAGE)
    if not inside:
        return install
    if inside.partition(":")[0] in images.split():
        return f"{inside} should hold it, so build that image again (docs/images.md)"
    return f"this is {inside}, choose {images}"


def has_dali() -> bool:
    """Whether NVIDIA DALI is installed (it is not imported)."""
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def _device_problems(document: RunConfig, place: Place) -> Iterator[str]:
    processes, nodes = processes_per_node(document), document.launch.nodes
    gpus = devices.visible_gpus()
    if gpus and processes > gpus:
        yield f"launch.processes {processes}: only {gpus} GPUs are visible here; set launch.processes={gpus}"
    if document.train.all_reduce.backend == "nccl" and not gpus:
        yield (
            "train.all_reduce.backend nccl: NCCL joins GPUs, and none is visible here; check the driver and the job's "
            "resources, or set train.all_reduce.backend=auto to train on CPUs"
        )
    if document.train.cuda_graph and not gpus:
        yield "train.cuda_graph: there is no NVIDIA GPU here to record a graph for; set train.cuda_graph=false"
    if place in ("here", "containers") and nodes > 1:
        yield f"launch.nodes {nodes}: this is one machine; set launch.nodes=1, or compile the pipeline for a cluster"
        return
    try:
        check_ranks(document, nodes * max(processes, devices_here(document)))
    except PydanticCustomError as error:
        yield error.message()
    available = devices.memory().available
    if available and processes * PROCESS_BYTES > available:
        yield (
            f"launch.processes {processes}: needs about {human_bytes(processes * PROCESS_BYTES)} of memory, "
            f"{human_bytes(available)} are free; set launch.processes to "
            f"{max(1, available // PROCESS_BYTES)} or less"
        )
    caches = cache_memory(document, processes)
    if available and caches > available:
        yield (
            f"input.record_cache_bytes and input.decoded_cache_bytes: {human_bytes(caches)} in {processes} processes, "
            f"{human_bytes(available)} of memory are free; lower them"
        )
    yield from _shared_memory_problems(document, processes)


def _shared_memory_problems(document: RunConfig, processes: int) -> Iterator[str]:
    """Loader processes hand their batches over through /dev/shm, of which a container has 64 MiB by default."""
    if not Path("/dev/shm").exists():
        return
    needed = shared_memory_needed(document, processes)
    free = devices.memory().shared_free
    if free < needed:
        yield (
            f"/dev/shm has {human_bytes(free)} free, the batches in flight need about "
            f"{human_bytes(needed)}; mount a larger one (a memory-backed emptyDir in a pod, --shm-size in a "
            "container) or lower input.prefetch and input.workers"
        )


def cache_memory(document: RunConfig, processes: int) -> int:
    """Bytes that the input caches of one node's processes may hold."""
    return processes * (document.input.record_cache_bytes + document.input.decoded_cache_bytes)


def shared_memory_needed(document: RunConfig, processes: int) -> int:
    """Bytes of /dev/shm that the batches in flight of one node take."""
    section = document.input
    if section.loader == "synthetic":
        return 0
    per_rank = document.train.global_batch // (processes * document.launch.nodes * document.train.accumulation)
    return processes * (section.prefetch + section.workers) * per_rank * 3 * max(document.training_sizes) ** 2


def _port_problems(document: RunConfig) -> Iterator[str]:
    telemetry = document.telemetry
    if not telemetry.enabled or not telemetry.required:
        return  # a run goes on without metrics, and says so
    family = socket.AF_INET6 if ":" in telemetry.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((telemetry.address, telemetry.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                yield (
                    f"telemetry.port {telemetry.port}: another program listens there; choose another port, "
                    "or telemetry.port=0 for any free one"
                )
            else:
                yield f"telemetry.address {telemetry.address}: cannot listen there: {error.strerror or error}"


def shard_set_counts(document: RunConfig, shard_set: str | None = None) -> dict[str, int]:
    """Samples by split of `shard_set` (default: the document's own) where it is complete here; empty where not."""
    default = f"{document.run.workspace}/datasets/{data_fingerprint(document.data)}"
    directory = local_directory(default if shard_set is None else shard_set)
    if directory is None:
        return {}
    path = directory / "manifest.json"
    try:
        splits = json.loads(path.read_text(encoding="utf-8"))["splits"]
        return {name: int(split["count"]) for name, split in splits.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no set, or a damaged one: the shard stage says what is wrong with it


def _data_problems(document: RunConfig, counts: dict[str, int]) -> Iterator[str]:
    if not counts:
        return
    ranks = processes_per_node(document) * document.launch.nodes
    train, validation = counts.get("train", 0), counts.get("validation", 0)
    if train < document.train.global_batch:
        yield (
            f"train.global_batch {document.train.global_batch} is larger than the training split of {train} images; "
            f"set train.global_batch to {train} or less"
        )
    if min(train, validation) < ranks:
        yield (
            f"{ranks} ranks, but only {train} training and {validation} validation images: lower launch.processes "
            f"to {max(1, min(train, validation))} or less, or give more images"
        )
