"""Preflight checks of files, devices, software and ports, before anything is started."""

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

from podscale.config.checks import check_ranks
from podscale.config.engine_support import TPU_RESOURCE, requests_tpus
from podscale.config.fields import refusal
from podscale.config.identity import data_fingerprint
from podscale.config.run_config import RunConfig
from podscale.errors import InputError, InputErrors
from podscale.util import env, host_info
from podscale.util.formatting import format_bytes
from podscale.util.locations import Location

PreflightTarget = Literal["here", "containers", "pod", "job", "cluster"]

MAX_MEASURED_FILES = 20_000
"""Files of a source folder that are measured to estimate the space of its shards; more would take too long."""
MIN_PROCESS_BYTES = 200 * 2**20
"""A training process takes at least this much memory before it holds any array."""
IMAGE_ENGINES = {"podscale-base": "pytorch", "podscale-gpu": "pytorch", "podscale-tpu": "jax"}
"""Engine of each of our container images (see images/)."""
SPARE_BYTES = 64 * 2**20
"""Space beyond the shards: index, report, logs."""


def preflight(document: RunConfig, target: PreflightTarget, shard_set: str | None = None) -> None:
    """Raise one InputError that lists every problem found.

    target: `here` is this machine with everything on it, `containers` the same with the software of an image, `pod` is
    one pod of a job (its launcher says how many nodes there are), `cluster` is a cluster seen from outside: only what
    the document alone shows is checked; `job` the same for a job, whose launcher counts the ranks of each pod.
    shard_set: location of the shards, for a stage that needs no source; default: the shards are still to be
    made (in a pod: by that pod, which then need not be fit for training).
    """
    problems = find_problems(document, target, shard_set)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise InputErrors(problems, f"this run cannot start; {len(problems)} things to change:")


def find_problems(document: RunConfig, target: PreflightTarget, shard_set: str | None = None) -> list[InputError]:
    """Return the problems, none if the run can start."""
    if target == "cluster":
        return [*_cluster_problems(document), *_rank_problems(document)]
    if target == "job":
        return list(_cluster_problems(document))
    counts = shard_set_counts(document, shard_set)
    images = _source_problems(document) if shard_set is None else _shard_set_problems(shard_set, counts)
    found = [*images, *_workspace_problems(document)]
    if target == "pod" and shard_set is None:
        return found  # this pod makes shards: it trains nothing
    if target != "containers":
        found += _software_problems(document)
    found += [*_device_problems(document, target), *_port_problems(document), *_data_problems(document, counts)]
    return found


def processes_per_node(document: RunConfig) -> int:
    """Training processes on this node: as the document says, else one per GPU, else one."""
    return document.launch.processes or host_info.default_processes_per_node()


def local_device_count(document: RunConfig) -> int:
    """Devices of this machine that the engine will compute on, if processes drive several; else 0."""
    if document.train.engine == "pytorch":
        return 0
    processes = processes_per_node(document)
    simulated = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    gpus = host_info.visible_gpus() if processes == 1 else 0  # of several processes each takes one
    return len(host_info.tpu_chips()) or gpus or processes * (int(simulated[1]) if simulated else 0)


def _cluster_problems(document: RunConfig) -> Iterator[InputError]:
    workspace = Location.parse(document.run.workspace).local_path
    if workspace is not None and not workspace.is_absolute():
        yield InputError(
            "relative, so that every pod would look somewhere else",
            field="run.workspace",
            got=document.run.workspace,
            hint="Give the path where the shared volume is mounted in the pods, such as /workspace",
        )
    source = Location.parse(document.data.source).local_path
    if source is not None and document.data.source != "digits" and not source.is_absolute():
        hint = "Give the path inside the pods, or a gs:// or s3:// URL."
        yield InputError("relative", field="data.source", got=document.data.source, hint=hint)
    yield from _engine_problems(document)
    yield from _image_problems(document)


def _image_problems(document: RunConfig) -> Iterator[InputError]:
    """Report a container image of ours that lacks the engine; the contents of other images are unknown here."""
    image, engine = document.launch.image, document.train.engine
    name = re.split("[:@]", image.rpartition("/")[2])[0]
    if name in IMAGE_ENGINES and IMAGE_ENGINES[name] != engine:
        fitting = "podscale-tpu" if engine == "jax" else "podscale-base or podscale-gpu"
        yield InputError(
            f"does not hold the engine of train.engine={engine}",
            field="launch.image",
            got=image,
            hint=f"Name {fitting}.",
        )


def _engine_problems(document: RunConfig) -> Iterator[InputError]:
    """Hardware that the engine does not compute on."""
    hardware = document.launch.hardware or document.launch.resources.accelerator
    if requests_tpus(document) and document.train.engine == "pytorch":
        yield InputError(
            "the PyTorch engine trains on GPUs and CPUs",
            field="launch.hardware",
            got=hardware,
            hint="Set train.engine=jax for TPUs.",
        )


def _rank_problems(document: RunConfig) -> Iterator[InputError]:
    hardware, resources = document.launch.hardware, document.launch.resources
    if not document.launch.processes and hardware is None and not resources.accelerators:
        yield InputError(
            "means one per GPU of whichever node a pod lands on",
            field="launch.processes",
            got=0,
            hint="Say how many, so that pods are alike.",
        )


def _source_problems(document: RunConfig) -> Iterator[InputError]:
    source = Location.parse(document.data.source).local_path
    if document.data.source == "digits" or source is None or shard_set_counts(document):
        return
    try:
        is_folder = source.is_dir()
        if is_folder and not os.access(source, os.R_OK | os.X_OK):
            yield InputError("this user may not read it", field="data.source", got=str(source))
        elif is_folder and next(source.iterdir(), None) is None:
            yield InputError(
                "the folder is empty",
                field="data.source",
                got=str(source),
                hint="It must hold one folder per class (or train/ and val/).",
            )
        elif not is_folder and not source.exists():
            parent = next(p for p in source.absolute().parents if p.exists())
            yield InputError(
                f"does not exist, the nearest folder that does is {parent}",
                field="data.source",
                got=str(source),
                hint="Set data.source=<folder>",
            )
    except OSError as error:
        yield InputError(f"cannot be read: {error.strerror}", field="data.source", got=str(source))


def _shard_set_problems(shard_set: str, counts: dict[str, int]) -> Iterator[InputError]:
    if Location.parse(shard_set).local_path is not None and not counts:
        yield InputError(
            "no complete shard set here",
            field=shard_set,
            hint="Run `podscale shard`, or name another with --shard-set.",
        )


def _workspace_problems(document: RunConfig) -> Iterator[InputError]:
    workspace = Location.parse(document.run.workspace).local_path
    if workspace is None:
        yield InputError(
            "a run directory needs a local or mounted file system",
            field="run.workspace",
            got=document.run.workspace,
            hint="Mount the bucket and give its path.",
        )
        return
    existing = next((p for p in (workspace.absolute(), *workspace.absolute().parents) if p.exists()), Path("/"))
    if not existing.is_dir():
        yield InputError(
            f"{existing} is a file", field="run.workspace", got=str(workspace), hint="Choose another run.workspace."
        )
        return
    if os.statvfs(existing).f_flag & os.ST_RDONLY or not os.access(existing, os.W_OK | os.X_OK):
        yield InputError(
            f"{existing} cannot be written",
            field="run.workspace",
            got=str(workspace),
            hint="Choose another run.workspace.",
        )
        return
    needed = _required_disk_bytes(document)
    free = shutil.disk_usage(existing).free
    if free < needed:
        yield InputError(
            f"{format_bytes(free)} free, about {format_bytes(needed)} needed",
            field="run.workspace",
            got=str(workspace),
            hint="Free some space or choose another run.workspace.",
        )


def _required_disk_bytes(document: RunConfig) -> int:
    """Bytes the run will at least write: copies of the source's images that do not exist yet."""
    if shard_set_counts(document):
        return SPARE_BYTES
    source = Location.parse(document.data.source).local_path
    if source is None or document.data.source == "digits":
        return SPARE_BYTES
    return SPARE_BYTES + (0 if document.data.resize_short else _measure_bytes(source))


def _measure_bytes(source: Path) -> int:
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
            if seen >= MAX_MEASURED_FILES:
                return total
    return total


def _software_problems(document: RunConfig) -> Iterator[InputError]:
    yield from _jax_problems(document) if document.train.engine == "jax" else _pytorch_problems()
    if document.input.loader == "dali" and not is_dali_installed():
        advice = _install_hint("Run `pip install 'podscale[gpu]'`", "podscale-gpu")
        yield InputError(
            "DALI is not installed",
            field="input.loader",
            got="dali",
            hint=f"{advice}, or set input.loader=torchvision.",
        )
    yield from _tracker_problems(document)


def _pytorch_problems() -> Iterator[InputError]:
    for module in ("torch", "torchvision"):
        if find_spec(module) is None:
            advice = _install_hint("Run `pip install 'podscale[torch]'`", "podscale-base or podscale-gpu")
            yield InputError(
                f"the PyTorch engine needs {module}, which is not installed", field="train.engine", hint=advice
            )


def _jax_problems(document: RunConfig) -> Iterator[InputError]:
    """Report a machine with TPUs but without their library: it would train on its CPU, unnoticed."""
    advice = _install_hint("Install 'jax[tpu]' on a TPU host, 'podscale[tpu]' elsewhere", "podscale-tpu")
    if find_spec("jax") is None:
        yield InputError("the JAX engine needs jax, which is not installed", field="train.engine", hint=advice)
    elif find_spec("libtpu") is None and (host_info.tpu_chips() or requests_tpus(document)):
        yield InputError(
            "JAX does not find the TPUs of this machine without libtpu, which is not installed",
            field="train.engine",
            hint=advice,
        )
    if requests_tpus(document) and not host_info.tpu_chips():
        yield InputError(
            "this machine has no TPU",
            field="launch.hardware",
            got=document.launch.hardware or TPU_RESOURCE,
            hint="Leave it out to train on what is here, or submit the run to a cluster.",
        )


def _tracker_problems(document: RunConfig) -> Iterator[InputError]:
    for name in ("wandb", "mlflow"):
        if name in document.telemetry.trackers and not _is_installed(name):
            advice = _install_hint(
                f"Run `pip install 'podscale[{name}]'`", f"one of your own on top of it that adds {name}"
            )
            yield InputError("not installed", field="telemetry.trackers", got=name, hint=f"{advice}, or remove it.")
    section = document.telemetry.mlflow
    if "mlflow" in document.telemetry.trackers and not (section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")):
        yield InputError(
            "nothing says where its server is",
            field="telemetry.trackers",
            got="mlflow",
            hint="Set telemetry.mlflow.tracking_uri or MLFLOW_TRACKING_URI (in pods: launch.cluster.env), or remove "
            "it.",
        )


def _is_installed(package: str) -> bool:
    """Return whether it can be imported; a folder of that name (wandb leaves one) is no package."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def _install_hint(install: str, images: str) -> str:
    """Advice on missing software: a container needs another image, because nothing can be installed into it."""
    inside = os.environ.get(env.IMAGE)
    if not inside:
        return install
    if inside.partition(":")[0] in images.split():
        return f"{inside} should hold it, so build that image again (docs/images.md)"
    return f"This is {inside}, choose {images}"


def is_dali_installed() -> bool:
    """Return whether NVIDIA DALI is installed (it is not imported)."""
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def _device_problems(document: RunConfig, target: PreflightTarget) -> Iterator[InputError]:
    processes, nodes = processes_per_node(document), document.launch.nodes
    gpus = host_info.visible_gpus()
    if gpus and processes > gpus:
        yield InputError(
            f"only {gpus} GPUs are visible here",
            field="launch.processes",
            got=processes,
            hint=f"Set launch.processes={gpus}",
        )
    if document.train.all_reduce.backend == "nccl" and not gpus:
        yield InputError(
            "no GPU is visible here",
            field="train.all_reduce.backend",
            got="nccl",
            hint="Check the driver and the job's resources, or set train.all_reduce.backend=auto to train on CPUs.",
        )
    if document.train.cuda_graph and not gpus:
        yield InputError("needs an NVIDIA GPU", field="train.cuda_graph", got=True, hint="Set train.cuda_graph=false")
    if target in ("here", "containers") and nodes > 1:
        yield InputError(
            "this is one machine",
            field="launch.nodes",
            got=nodes,
            hint="Set launch.nodes=1, or compile the pipeline for a cluster.",
        )
        return
    try:
        check_ranks(document, nodes * max(processes, local_device_count(document)))
    except PydanticCustomError as error:
        yield refusal(error)
    available = host_info.memory_info().available
    if available and processes * MIN_PROCESS_BYTES > available:
        yield InputError(
            f"needs about {format_bytes(processes * MIN_PROCESS_BYTES)} of memory, {format_bytes(available)} are free",
            field="launch.processes",
            got=processes,
            hint=f"Set launch.processes to {max(1, available // MIN_PROCESS_BYTES)} or less.",
        )
    caches = input_cache_bytes(document, processes)
    if available and caches > available:
        section = document.input
        yield InputError(
            f"with input.decoded_cache_bytes={section.decoded_cache_bytes} the caches of {processes} processes may "
            f"hold {format_bytes(caches)}, {format_bytes(available)} of memory are free",
            field="input.record_cache_bytes",
            got=section.record_cache_bytes,
            hint="Lower them.",
        )
    yield from _shared_memory_problems(document, processes)


def _shared_memory_problems(document: RunConfig, processes: int) -> Iterator[InputError]:
    """Loader processes hand their batches over through /dev/shm, of which a container has 64 MiB by default."""
    if not Path("/dev/shm").exists():
        return
    needed = shared_memory_bytes(document, processes)
    free = host_info.memory_info().shared_free
    if free < needed:
        yield InputError(
            f"{format_bytes(free)} free, the batches in flight need about {format_bytes(needed)}",
            field="/dev/shm",
            hint="Mount a larger one (a memory-backed emptyDir in a pod, --shm-size in a container), or lower "
            "input.prefetch and input.workers.",
        )


def input_cache_bytes(document: RunConfig, processes: int) -> int:
    """Bytes that the input caches of one node's processes may hold."""
    return processes * (document.input.record_cache_bytes + document.input.decoded_cache_bytes)


def shared_memory_bytes(document: RunConfig, processes: int) -> int:
    """Bytes of /dev/shm that the batches in flight of one node take."""
    section = document.input
    if section.loader == "synthetic":
        return 0
    per_rank = document.train.global_batch // (processes * document.launch.nodes * document.train.accumulation)
    return processes * (section.prefetch + section.workers) * per_rank * 3 * max(document.training_sizes) ** 2


def _port_problems(document: RunConfig) -> Iterator[InputError]:
    telemetry = document.telemetry
    if not telemetry.enabled or not telemetry.required:
        return  # a run continues without metrics and logs that
    family = socket.AF_INET6 if ":" in telemetry.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((telemetry.address, telemetry.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                yield InputError(
                    "another program listens there",
                    field="telemetry.port",
                    got=telemetry.port,
                    hint="Choose another port, or telemetry.port=0 for any free one.",
                )
            else:
                yield InputError(
                    f"cannot listen there: {error.strerror or error}", field="telemetry.address", got=telemetry.address
                )


def shard_set_counts(document: RunConfig, shard_set: str | None = None) -> dict[str, int]:
    """Samples by split of `shard_set` (default: the document's own) if it is complete here; else empty."""
    default = Location.parse(document.run.workspace).join("datasets", data_fingerprint(document.data))
    directory = (default if shard_set is None else Location.parse(shard_set)).local_path
    if directory is None:
        return {}
    path = directory / "manifest.json"
    try:
        splits = json.loads(path.read_text(encoding="utf-8"))["splits"]
        return {name: int(split["count"]) for name, split in splits.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no set, or a damaged one: the shard stage reports the damage


def _data_problems(document: RunConfig, counts: dict[str, int]) -> Iterator[InputError]:
    if not counts:
        return
    ranks = processes_per_node(document) * document.launch.nodes
    train, validation = counts.get("train", 0), counts.get("validation", 0)
    if train < document.train.global_batch:
        yield InputError(
            f"larger than the training split of {train} images",
            field="train.global_batch",
            got=document.train.global_batch,
            hint=f"Set train.global_batch to {train} or less.",
        )
    if min(train, validation) < ranks:
        yield InputError(
            f"{ranks} ranks, but only {train} training and {validation} validation images",
            field="launch.processes",
            got=processes_per_node(document),
            hint=f"Lower it to {max(1, min(train, validation))} or less, or give more images.",
        )
