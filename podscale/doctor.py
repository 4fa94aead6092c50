"""`podscale doctor`: what this machine offers, and what is missing for what. Every line says what to do."""

import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from podscale import devices
from podscale.errors import ExitCode
from podscale.terminal import paint
from podscale.text import human_bytes
from podscale.version import VERSION, installed

Verdict = Literal["ok", "note", "missing"]

PYTHON = (3, 11)
COMFORTABLE_MEMORY = 4 * 2**30
COMFORTABLE_SHARED = 2**30
COMFORTABLE_DISK = 10 * 2**30
METRICS_PORT = 9400
"""The port that presets for clusters use."""


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do where something is missing."""

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def main(workspace: Path, *, as_json: bool) -> int:
    """Prints the findings; the exit code is 2 where training is not possible here."""
    findings = examine(workspace)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(_lines(findings)))
    return int(ExitCode.BAD_INPUT if any(finding.verdict == "missing" for finding in findings) else ExitCode.DONE)


def examine(workspace: Path) -> list[Finding]:
    """Looks at everything; nothing is written and nothing is started for longer than the look."""
    return [*_system(), *_memory(), *_disk(workspace), *_network(), *_software(), *_engine(), *_cluster()]


def _system() -> Iterator[Finding]:
    version = platform.python_version()
    good = sys.version_info[:2] >= PYTHON
    yield Finding("podscale", "ok", f"{VERSION} from {Path(__file__).parent}")
    yield Finding(
        "python",
        "ok" if good else "missing",
        version,
        "" if good else f"install Python {PYTHON[0]}.{PYTHON[1]} or newer",
    )
    linux = sys.platform == "linux"
    yield Finding(
        "system",
        "ok" if linux else "missing",
        platform.platform(),
        "" if linux else "training runs on Linux; use WSL or a container",
    )
    yield Finding("processor", "ok", f"{devices.cores()} cores for this process, {devices.cpu_name()}")
    gpus = devices.visible_gpus()
    if gpus:
        yield Finding("GPUs", "ok", f"{gpus} visible: {', '.join(devices.gpu_names())}")
    else:
        hidden = "; CUDA_VISIBLE_DEVICES hides them" if devices.gpu_names() else ""
        yield Finding("GPUs", "note", f"none{hidden}", "small runs work on the CPU (try `podscale run`)")


def _memory() -> Iterator[Finding]:
    memory = devices.memory()
    enough = memory.available >= COMFORTABLE_MEMORY
    yield Finding(
        "memory",
        "ok" if enough else "note",
        f"{human_bytes(memory.available)} free of {human_bytes(memory.total)}",
        "" if enough else "use small batches, or close other programs",
    )
    enough = memory.shared_free >= COMFORTABLE_SHARED
    yield Finding(
        "/dev/shm",
        "ok" if enough else "note",
        f"{human_bytes(memory.shared_free)} free",
        ""
        if enough
        else "loader processes hand batches over here: --shm-size in a container, a memory-backed emptyDir in a pod",
    )


def _disk(workspace: Path) -> Iterator[Finding]:
    existing = next(path for path in (workspace.absolute(), *workspace.absolute().parents) if path.exists())
    subject = f"workspace {workspace}"
    if not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        yield Finding(subject, "missing", f"{existing} cannot be written", "choose another one with run.workspace")
        return
    free = shutil.disk_usage(existing).free
    enough = free >= COMFORTABLE_DISK
    yield Finding(
        subject,
        "ok" if enough else "note",
        f"{human_bytes(free)} free on {existing}",
        "" if enough else "shards take about the size of the images, each checkpoint twice the model's",
    )


def _network() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield Finding("loopback ports", "ok", "ranks on this machine can meet")
    except OSError as error:
        yield Finding(
            "loopback ports", "missing", str(error), "allow processes to listen on 127.0.0.1: ranks meet there"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", METRICS_PORT))
            yield Finding(f"metrics port {METRICS_PORT}", "ok", "free")
        except OSError as error:
            yield Finding(
                f"metrics port {METRICS_PORT}", "note", str(error.strerror), "set telemetry.port (0 = any free one)"
            )


def _software() -> Iterator[Finding]:
    for package, purpose, advice in (
        ("kfp", "`podscale run` and `podscale compile`", "pip install podscale"),
        ("simplejpeg", "validating and decoding JPEGs", "pip install podscale"),
        ("scikit-learn", "the embedded digits", "pip install podscale"),
    ):
        version = installed(package)
        yield Finding(
            package, "ok" if version else "missing", version or f"needed for {purpose}", "" if version else advice
        )
    dali = installed("nvidia-dali-cuda130") if find_spec("nvidia") else None
    yield Finding(
        "DALI",
        "ok" if dali else "note",
        dali or "not installed: GPUs decode by torchvision (input.loader=nvjpeg), CPUs as ever",
        "" if dali else "on Linux x86-64: pip install 'podscale[gpu]'",
    )


def _engine() -> Iterator[Finding]:
    if installed("torch") is None or installed("torchvision") is None:
        yield Finding("PyTorch", "missing", "needed for training and evaluation", "pip install 'podscale[torch]'")
        return
    from podscale.pytorch import capabilities

    found = capabilities.probe()
    yield Finding("PyTorch", "ok", f"{found.version}, CUDA {found.cuda or 'not built in'}")
    gpus = devices.visible_gpus()
    if gpus and not found.gpus:
        yield Finding(
            "CUDA", "missing", f"{gpus} GPUs, none usable by PyTorch", "install a PyTorch build for your driver"
        )
    elif found.gpus:
        yield Finding("CUDA", "ok", ", ".join(found.gpus))
    yield Finding(
        "gloo",
        "ok" if found.gloo else "missing",
        "between CPU processes",
        "" if found.gloo else "install another build of PyTorch",
    )
    if gpus:
        yield Finding(
            "NCCL",
            "ok" if found.nccl else "missing",
            found.nccl or "needed between GPUs",
            "" if found.nccl else "install PyTorch with CUDA",
        )


def _cluster() -> Iterator[Finding]:
    for package, purpose in (("gcsfs", "gs:// sources"), ("s3fs", "s3:// sources"), ("kfp-kubernetes", "clusters")):
        version = installed(package)
        yield Finding(
            package,
            "ok" if version else "note",
            version or f"needed for {purpose} only",
            "" if version else "pip install 'podscale[cluster]'",
        )


def _lines(findings: list[Finding]) -> Iterator[str]:
    styles = {"ok": "green", "note": "yellow", "missing": "bold red"}
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        word = paint(f"{finding.verdict:<7}", styles[finding.verdict], sys.stdout)
        advice = f" -> {finding.advice}" if finding.advice else ""
        yield f"{word}  {finding.subject:<{width}}  {finding.found}{advice}"
