"""Checks of this machine for `podscale doctor`; each line that is not ok has advice."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from podscale.util import env, host_info
from podscale.util.formatting import format_bytes
from podscale.util.terminal import CheckResult
from podscale.version import VERSION, installed

PYTHON = (3, 11)
COMFORTABLE_MEMORY_BYTES = 4 * 2**30
COMFORTABLE_SHM_BYTES = 2**30
COMFORTABLE_DISK_BYTES = 10 * 2**30
METRICS_PORT = 9400
"""Port in the presets for clusters."""
OMITTED_FROM_IMAGE = {
    "podscale-base": ("DALI",),
    "podscale-tools": ("PyTorch", "DALI"),
    "podscale-tpu": ("PyTorch", "DALI"),
}
"""Subjects that an image omits on purpose, because its pods never need them (see images/)."""

GPUS_IN_A_CONTAINER = (
    "the driver and the devices come from the node: nvidia.com/gpu among a pod's limits (launch.resources), "
    "docker run --gpus all, podman run --device nvidia.com/gpu=all; without GPUs stages run on the CPU"
)
ELSEWHERE = "stages run in the image that launch.image names"


def check_machine(workspace: Path) -> list[CheckResult]:
    """Return the results of all checks; nothing is written."""
    checks = (
        _check_system(),
        _check_gpus(),
        _check_tpus(),
        _check_memory(),
        _check_disk(workspace),
        _check_network(),
        _check_software(),
        _check_engine(),
        _check_jax(),
        _check_cluster_client(),
    )
    return [_adjust_for_image(result) for results in checks for result in results]


def _adjust_for_image(result: CheckResult) -> CheckResult:
    """Turn a result into a note if it is about software that this image omits on purpose."""
    image = os.environ.get(env.IMAGE, "")
    if result.verdict == "ok" or result.subject not in OMITTED_FROM_IMAGE.get(image, ()):
        return result
    return replace(result, verdict="note", found=f"not in {image}, which does without", advice=ELSEWHERE)


def _check_system() -> Iterator[CheckResult]:
    version = platform.python_version()
    good = sys.version_info[:2] >= PYTHON
    image = f" in {os.environ[env.IMAGE]}" if os.environ.get(env.IMAGE) else ""
    yield CheckResult("podscale", "ok", f"{VERSION}{image} from {Path(__file__).parent}")
    yield CheckResult(
        "python",
        "ok" if good else "missing",
        version,
        "" if good else f"install Python {PYTHON[0]}.{PYTHON[1]} or newer",
    )
    linux = sys.platform == "linux"
    yield CheckResult(
        "system",
        "ok" if linux else "missing",
        platform.platform(),
        "" if linux else "training runs on Linux; use WSL or a container",
    )
    yield CheckResult("processor", "ok", f"{host_info.cpu_count()} cores for this process, {host_info.cpu_name()}")


def _check_gpus() -> Iterator[CheckResult]:
    gpus = host_info.visible_gpus()
    if gpus:
        yield CheckResult("GPUs", "ok", f"{gpus} visible: {', '.join(host_info.gpu_names())}")
        return
    hidden = "; CUDA_VISIBLE_DEVICES hides them" if host_info.gpu_names() else ""
    here = "small runs work on the CPU (try `podscale run`)"
    in_gpu_image = os.environ.get(env.IMAGE) == "podscale-gpu"
    yield CheckResult("GPUs", "note", f"none{hidden}", GPUS_IN_A_CONTAINER if in_gpu_image else here)


def _check_tpus() -> Iterator[CheckResult]:
    """Yield nothing if neither a chip nor its library is here."""
    chips, library = host_info.tpu_chips(), installed("libtpu")
    if chips:
        yield CheckResult("TPUs", "ok", f"{len(chips)} chips of {', '.join(sorted(set(chips)))}")
    elif library is not None:
        yield CheckResult("TPUs", "note", "none: JAX finds its CPU only", "start it on a machine with TPUs")


def _check_jax() -> Iterator[CheckResult]:
    """Yield nothing if neither JAX nor a TPU is here."""
    chips, library = host_info.tpu_chips(), installed("libtpu")
    if installed("jax") is None:
        if chips:
            yield CheckResult("JAX", "missing", "needed for training on TPUs", "pip install 'jax[tpu]' 'podscale[tpu]'")
        return
    from podscale.jax import software

    probe = software.probe()
    versions = f"{probe.version}, libtpu {library or 'not installed'}"
    if probe.problem:
        yield CheckResult(
            "JAX", "missing", f"{versions}: {probe.problem}", "end what else uses its devices, or see there"
        )
    elif chips and probe.platform != "tpu":
        advice = "pip install 'jax[tpu]'" if library is None else "unset JAX_PLATFORMS"
        yield CheckResult("JAX", "missing", f"{versions}: it finds its {probe.platform} only, not the TPUs", advice)
    else:
        kinds = ", ".join(sorted(set(probe.devices)))
        yield CheckResult("JAX", "ok", f"{versions}: {len(probe.devices)} x {kinds} (train.engine=jax)")


def _check_memory() -> Iterator[CheckResult]:
    memory = host_info.memory_info()
    enough = memory.available >= COMFORTABLE_MEMORY_BYTES
    yield CheckResult(
        "memory",
        "ok" if enough else "note",
        f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}",
        "" if enough else "use small batches, or close other programs",
    )
    enough = memory.shared_free >= COMFORTABLE_SHM_BYTES
    yield CheckResult(
        "/dev/shm",
        "ok" if enough else "note",
        f"{format_bytes(memory.shared_free)} free",
        ""
        if enough
        else "loader processes hand batches over here: --shm-size in a container, a memory-backed emptyDir in a pod",
    )


def _check_disk(workspace: Path) -> Iterator[CheckResult]:
    existing = next(path for path in (workspace.absolute(), *workspace.absolute().parents) if path.exists())
    subject = f"workspace {workspace}"
    if not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        yield CheckResult(subject, "missing", f"{existing} cannot be written", "choose another one with run.workspace")
        return
    free = shutil.disk_usage(existing).free
    enough = free >= COMFORTABLE_DISK_BYTES
    yield CheckResult(
        subject,
        "ok" if enough else "note",
        f"{format_bytes(free)} free on {existing}",
        "" if enough else "shards take about the size of the images, each checkpoint twice the model's",
    )


def _check_network() -> Iterator[CheckResult]:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield CheckResult("loopback ports", "ok", "ranks on this machine can meet")
    except OSError as error:
        yield CheckResult(
            "loopback ports", "missing", str(error), "allow processes to listen on 127.0.0.1: ranks meet there"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", METRICS_PORT))
            yield CheckResult(f"metrics port {METRICS_PORT}", "ok", "free")
        except OSError as error:
            yield CheckResult(
                f"metrics port {METRICS_PORT}", "note", str(error.strerror), "set telemetry.port (0 = any free one)"
            )


def _check_software() -> Iterator[CheckResult]:
    for package, purpose, advice in (
        ("kfp", "`podscale run` and `podscale compile`", "pip install podscale"),
        ("simplejpeg", "validating and decoding JPEGs", "pip install podscale"),
    ):
        version = installed(package)
        yield CheckResult(
            package, "ok" if version else "missing", version or f"needed for {purpose}", "" if version else advice
        )
    dali = installed("nvidia-dali-cuda130") if find_spec("nvidia") else None
    yield CheckResult(
        "DALI",
        "ok" if dali else "note",
        dali or "not installed: GPUs decode by torchvision (input.loader=nvjpeg), CPUs as ever",
        "" if dali else "on Linux x86-64: pip install 'podscale[gpu]'",
    )


def _check_engine() -> Iterator[CheckResult]:
    if installed("torch") is None or installed("torchvision") is None:
        yield CheckResult("PyTorch", "missing", "needed for training and evaluation", "pip install 'podscale[torch]'")
        return
    from podscale.pytorch import software

    probe = software.probe()
    yield CheckResult("PyTorch", "ok", f"{probe.version}, CUDA {probe.cuda or 'not built in'}")
    gpus = host_info.visible_gpus()
    if gpus and not probe.gpus:
        yield CheckResult(
            "CUDA", "missing", f"{gpus} GPUs, none usable by PyTorch", "install a PyTorch build for your driver"
        )
    elif probe.gpus:
        yield CheckResult("CUDA", "ok", ", ".join(probe.gpus))
    yield CheckResult(
        "gloo",
        "ok" if probe.gloo else "missing",
        "between CPU processes",
        "" if probe.gloo else "install another build of PyTorch",
    )
    if gpus:
        yield CheckResult(
            "NCCL",
            "ok" if probe.nccl else "missing",
            probe.nccl or "needed between GPUs",
            "" if probe.nccl else "install PyTorch with CUDA",
        )


def _check_cluster_client() -> Iterator[CheckResult]:
    for package, purpose in (("gcsfs", "gs:// sources"), ("s3fs", "s3:// sources"), ("kfp-kubernetes", "clusters")):
        version = installed(package)
        yield CheckResult(
            package,
            "ok" if version else "note",
            version or f"needed for {purpose} only",
            "" if version else "pip install 'podscale[cluster]'",
        )
