"""`podscale doctor`: checks of this machine or of a cluster."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli import gpu_doctor
from podscale.cli.documents import load_for_cluster, load_with_defaults
from podscale.cli.options import ClusterDefaults, ClusterOptions, Json, Run, Set, expand_option_groups
from podscale.errors import PodscaleError
from podscale.util import env, host_info
from podscale.util.formatting import format_bytes
from podscale.util.terminal import CheckResult, CheckStatus, print_check_results
from podscale.version import VERSION, installed

if TYPE_CHECKING:
    from podscale.pytorch.software import Capabilities

app = typer.Typer()

NAMESPACE_FIELD = "launch.cluster.namespace"
"""Field of the error for a namespace that does not exist, which the check of the namespace reports too."""
PYTHON = (3, 11)
COMFORTABLE_MEMORY_BYTES = 4 * 2**30
COMFORTABLE_SHM_BYTES = 2**30
COMFORTABLE_DISK_BYTES = 10 * 2**30
METRICS_PORT = 9400
"""Metrics port of the presets for clusters."""
OMITTED_FROM_IMAGE = {
    "podscale-base": ("DALI",),
    "podscale-tools": ("PyTorch", "DALI"),
    "podscale-tpu": ("PyTorch", "DALI"),
    "podscale-gpu-jax": ("PyTorch", "DALI"),
}
"""Software that an image omits, because its pods never need it (see images/)."""

GPUS_IN_A_CONTAINER = (
    "the driver and the devices come from the node: nvidia.com/gpu among a pod's limits (launch.resources), "
    "docker run --gpus all, podman run --device nvidia.com/gpu=all; without GPUs stages run on the CPU"
)
ELSEWHERE = "stages run in the image that launch.image names"


@app.command()
@expand_option_groups
def doctor(
    document: Run = None,
    changes: Set = [],
    *,
    as_json: Json = False,
    workspace: Annotated[Path, typer.Option(help="Workspace to check.")] = Path(),
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the Kubernetes cluster instead, for the run document.")
    ] = False,
    defaults: ClusterDefaults = "cluster",
    pull: Annotated[
        bool,
        typer.Option(
            "--pull/--no-pull",
            help="With --cluster: let a node pull the images, by a Job of one small pod that is deleted; nothing else "
            "is created.",
        ),
    ] = True,
    cluster_options: ClusterOptions,
) -> None:
    """Check this machine, or a cluster, and print what it has and what is missing."""
    results = (
        _check_cluster(document, [*changes, *cluster_options.changes], defaults, pull=pull)
        if cluster
        else check_machine(workspace)
    )
    raise typer.Exit(print_check_results(results, as_json=as_json))


def _check_cluster(document: str | None, changes: Sequence[str], defaults: str, *, pull: bool) -> list[CheckResult]:
    """Check a cluster for a document, with the chart's defaults if those of the namespace cannot be read."""
    from podscale.kubernetes.cluster_doctor import check_cluster

    defaults_error: PodscaleError | None = None
    try:
        config = load_with_defaults(document, changes, defaults)
    except PodscaleError as error:
        config, _ = load_for_cluster(document, changes, None)  # raises if the document itself is wrong
        defaults_error = error
    results = list(check_cluster(config, pull=pull))
    has_server = results[0].verdict == "ok"  # else there is nothing to read the defaults from
    if defaults_error is not None and has_server and defaults_error.field != NAMESPACE_FIELD:
        advice = "fix them: the other checks assumed those of the chart"
        results.insert(1, CheckResult("defaults", "missing", str(defaults_error), advice))
    return results


def check_machine(workspace: Path) -> list[CheckResult]:
    """Check this machine and a workspace on it."""
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
    """Turn a result into a note if it is about software that this image omits."""
    image = os.environ.get(env.IMAGE, "")
    if result.verdict == "ok" or result.subject not in OMITTED_FROM_IMAGE.get(image, ()):
        return result
    return replace(result, verdict="note", found=f"not in {image}, which does without", advice=ELSEWHERE)


def _check(subject: str, passed: object, found: str, advice: str, *, otherwise: CheckStatus = "missing") -> CheckResult:
    """Return the result of a check, with the advice if it did not pass."""
    return CheckResult(subject, "ok", found) if passed else CheckResult(subject, otherwise, found, advice)


def _check_system() -> Iterator[CheckResult]:
    image = f" in {os.environ[env.IMAGE]}" if os.environ.get(env.IMAGE) else ""
    yield CheckResult("podscale", "ok", f"{VERSION}{image} from {Path(__file__).parent}")
    advice = f"install Python {PYTHON[0]}.{PYTHON[1]} or newer"
    yield _check("python", sys.version_info[:2] >= PYTHON, platform.python_version(), advice)
    advice = "training runs on Linux; use WSL or a container"
    yield _check("system", sys.platform == "linux", platform.platform(), advice)
    yield CheckResult("processor", "ok", f"{host_info.cpu_count()} cores for this process, {host_info.cpu_name()}")


def _check_gpus() -> Iterator[CheckResult]:
    gpus = host_info.visible_gpus()
    if gpus:
        yield CheckResult("GPUs", "ok", f"{gpus} visible: {', '.join(host_info.gpu_names())}")
        return
    hidden = "; CUDA_VISIBLE_DEVICES hides them" if host_info.gpu_names() else ""
    in_gpu_image = os.environ.get(env.IMAGE) in ("podscale-gpu", "podscale-gpu-jax")
    advice = GPUS_IN_A_CONTAINER if in_gpu_image else "small runs work on the CPU (try `podscale run`)"
    yield CheckResult("GPUs", "note", f"none{hidden}", advice)


def _check_tpus() -> Iterator[CheckResult]:
    """Check TPU chips; yield nothing without chips and libtpu."""
    if chips := host_info.tpu_chips():
        yield CheckResult("TPUs", "ok", f"{len(chips)} chips of {', '.join(sorted(set(chips)))}")
    elif installed("libtpu") is not None:
        yield CheckResult("TPUs", "note", "none: JAX finds only the CPU", "run it on a machine with TPUs")


def _check_jax() -> Iterator[CheckResult]:
    """Check JAX; yield nothing without JAX and TPUs."""
    chips, library = host_info.tpu_chips(), installed("libtpu")
    if installed("jax") is None:
        if chips:
            yield CheckResult("JAX", "missing", "needed for training on TPUs", "pip install 'jax[tpu]' 'podscale[tpu]'")
        return
    from podscale.jax import software

    probe = software.probe()
    versions = f"{probe.version}, libtpu {library or 'not installed'}"
    if probe.problem:
        advice = "stop other programs that use its devices, or follow the message"
        yield CheckResult("JAX", "missing", f"{versions}: {probe.problem}", advice)
    elif chips and probe.platform != "tpu":
        advice = "pip install 'jax[tpu]'" if library is None else "unset JAX_PLATFORMS"
        yield CheckResult("JAX", "missing", f"{versions}: it finds only {probe.platform}, not the TPUs", advice)
    else:
        kinds = ", ".join(sorted(set(probe.devices)))
        yield CheckResult("JAX", "ok", f"{versions}: {len(probe.devices)} x {kinds} (train.engine=jax)")


def _check_memory() -> Iterator[CheckResult]:
    memory = host_info.memory_info()
    found = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    advice = "use small batches, or close other programs"
    yield _check("memory", memory.available >= COMFORTABLE_MEMORY_BYTES, found, advice, otherwise="note")
    found = f"{format_bytes(memory.shared_free)} free"
    advice = "loader processes pass batches through it: --shm-size in a container, a memory-backed emptyDir in a pod"
    yield _check("/dev/shm", memory.shared_free >= COMFORTABLE_SHM_BYTES, found, advice, otherwise="note")


def _check_disk(workspace: Path) -> Iterator[CheckResult]:
    existing = next(path for path in (workspace.absolute(), *workspace.absolute().parents) if path.exists())
    subject = f"workspace {workspace}"
    if not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        yield CheckResult(subject, "missing", f"{existing} cannot be written", "choose another one with run.workspace")
        return
    free = shutil.disk_usage(existing).free
    found = f"{format_bytes(free)} free on {existing}"
    advice = "shards need about the size of the images, each checkpoint twice that of the model"
    yield _check(subject, free >= COMFORTABLE_DISK_BYTES, found, advice, otherwise="note")


def _check_network() -> Iterator[CheckResult]:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield CheckResult("loopback ports", "ok", "ranks on this machine can connect")
    except OSError as error:
        advice = "allow processes to listen on 127.0.0.1: ranks connect there"
        yield CheckResult("loopback ports", "missing", str(error), advice)
    subject = f"metrics port {METRICS_PORT}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", METRICS_PORT))
            yield CheckResult(subject, "ok", "free")
        except OSError as error:
            yield CheckResult(subject, "note", str(error.strerror), "set telemetry.port (0 = any free one)")


def _check_software() -> Iterator[CheckResult]:
    for package, purpose in (
        ("kfp", "`podscale run` and `podscale compile`"),
        ("simplejpeg", "validating and decoding JPEGs"),
    ):
        version = installed(package)
        yield _check(package, version, version or f"needed for {purpose}", "pip install podscale")
    yield _check_native_extension()
    dali = installed("nvidia-dali-cuda130") if find_spec("nvidia") else None
    found = dali or "not installed: on GPUs, torchvision decodes (input.loader=nvjpeg)"
    yield _check("DALI", dali, found, "on Linux x86-64: pip install 'podscale[gpu]'", otherwise="note")


def _check_native_extension() -> CheckResult:
    """Check the extension that decodes crops; without it the same pixels take longer."""
    from podscale.data import native

    subject = "native decoder"
    if not native.is_installed():
        found = "not installed: images for CPUs are decoded at less than half the speed, with the same pixels"
        advice = "install the wheel of Podscale for this kind of machine, or cargo (Rust 1.89 or later) and its source"
        return CheckResult(subject, "note", found, advice)
    if not native.is_available():
        found = "not used: the installed Pillow has other pixels; images for CPUs are decoded at half the speed"
        return CheckResult(subject, "note", found, "install the Pillow of requirements/run.txt, or any from 11 to 13")
    kernels = native.kernels()[0]
    if kernels == "portable":
        found = "slower: this processor has neither AVX2 nor NEON"
        return CheckResult(subject, "note", found, "none: the pixels are the same")
    return CheckResult(subject, "ok", f"with {kernels.upper()}")


def _check_engine() -> Iterator[CheckResult]:
    if installed("torch") is None or installed("torchvision") is None:
        yield CheckResult("PyTorch", "missing", "needed for training and evaluation", "pip install 'podscale[torch]'")
        return
    from podscale.pytorch import software

    probe = software.probe()
    yield CheckResult("PyTorch", "ok", f"{probe.version}, CUDA {probe.cuda or 'not built in'}")
    gpus = host_info.visible_gpus()
    if gpus or probe.gpus:
        found = ", ".join(probe.gpus) or f"{gpus} GPUs, none usable by PyTorch"
        yield _check("CUDA", probe.gpus, found, "install a PyTorch build for your driver")
        yield from _check_driver(probe)
        yield from _check_triton()
        yield from gpu_doctor.check_gpus(usable=len(probe.gpus))
    yield _check("gloo", probe.gloo, "between CPU processes", "install another build of PyTorch")
    if gpus:
        yield _check("NCCL", probe.nccl, probe.nccl or "needed between GPUs", "install PyTorch with CUDA")


def _check_driver(probe: "Capabilities") -> Iterator[CheckResult]:
    """Check the driver against the CUDA version of torch. A compatibility package may make an older one work."""
    driver = host_info.nvidia_driver()
    problem = host_info.driver_problem(probe.cuda)
    advice = "update the node's driver, or install a PyTorch build for an older CUDA"
    otherwise: CheckStatus = "note" if probe.gpus else "missing"
    yield _check("NVIDIA driver", not problem, problem or driver or "version unknown", advice, otherwise=otherwise)


def _check_triton() -> Iterator[CheckResult]:
    """Check what Triton compiles its launchers with: without it, kernels of optimizers and torch.compile fail."""
    version = installed("triton")
    if version is None:
        yield CheckResult("Triton", "note", "not installed: no fused kernels, no torch.compile", "pip install triton")
        return
    if missing := host_info.missing_for_triton():
        advice = "install them (Debian: gcc, python3-dev), or set CC to a compiler and train.compile=off"
        yield CheckResult("Triton", "missing", f"{version} needs {' and '.join(missing)} to compile kernels", advice)
    else:
        yield CheckResult("Triton", "ok", f"{version}, compiler {host_info.c_compiler()}")


def _check_cluster_client() -> Iterator[CheckResult]:
    for package, purpose in (("gcsfs", "gs:// sources"), ("s3fs", "s3:// sources"), ("kfp-kubernetes", "clusters")):
        version = installed(package)
        found = version or f"needed for {purpose} only"
        yield _check(package, version, found, "pip install 'podscale[cluster]'", otherwise="note")
