"""Look up hardware by name, such as `nvidia-h100-80gb x8` or `tpu-v5e-4x4`, for a pod's resource requests."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from podscale.errors import InputError
from podscale.hardware.gpus import GPU_KINDS, GpuDirect, GpuKind, find_gpu_kind
from podscale.hardware.tpus import TPU_KINDS, TpuKind

POD_SHARE = 0.85
"""Fraction of a machine's cores and memory that one pod requests; the node and its daemons need the rest. GKE reserves
from 2 % (of 1.8 TB) to 16 % (of 16 GB) of the memory (recalled), other daemons 1 or 2 GB."""

_GPU = re.compile(r"^(?P<name>nvidia-[a-z0-9-]+?)(?:\s*x\s*(?P<count>\d+))?$")
_TPU = re.compile(r"^(?P<name>tpu-[a-z0-9]+|tpu7x)-(?P<topology>\d+(?:x\d+)+)$")


@dataclass(frozen=True)
class Hardware:
    """Hardware of one pod of a job.

    Args:
        resource: Kubernetes resource name of the accelerators.
        hosts: pods of a TPU slice; 1 for everything else.
        cpus: cores of the machine; 0 if not in the table.
        memory_gib: memory of the machine; 0 if not in the table.
    """

    name: str
    kind: Literal["cpu", "gpu", "tpu"] = "cpu"
    machine: str | None = None
    resource: str | None = None
    accelerators: int = 0
    hosts: int = 1
    topology: str | None = None
    cpus: int = 0
    memory_gib: float = 0.0
    gpudirect: GpuDirect | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)

    @property
    def cpus_to_request(self) -> float:
        """Cores that a pod which fills the machine may request."""
        return float(int(self.cpus * POD_SHARE))

    @property
    def memory_gib_to_request(self) -> float:
        """Memory in GiB that a pod which fills the machine may request."""
        return float(int(self.memory_gib * POD_SHARE))


CPU = Hardware("cpu")


def find_hardware(name: str) -> Hardware:
    """Return the hardware of a name. Raises InputError, which lists the valid names, if there is none."""
    text = " ".join(name.split()).lower()
    if text == "cpu":
        return CPU
    if (match := _GPU.match(text)) and (gpu := find_gpu_kind(match["name"])):
        return _gpu_hardware(gpu, int(match["count"] or gpu.gpus_per_machine[0]))
    if match := _TPU.match(text):
        tpu = next((kind for kind in TPU_KINDS if kind.name == match["name"]), None)
        if tpu is not None:
            return _tpu_hardware(tpu, match["topology"])
    if bare := next((kind for kind in TPU_KINDS if kind.name == text), None):
        raise InputError(
            "needs a topology", field="launch.hardware", got=name, hint=f"{bare.name} has {bare.topology_rule}"
        )
    raise InputError(
        "no such hardware",
        field="launch.hardware",
        got=name,
        hint=f"{_suggest_name(text)}Known: {', '.join(hardware_names())}",
    )


def hardware_names() -> list[str]:
    """Return every kind of hardware as it is written: `nvidia-l4 x1|2|4|8`, `tpu-v5e-TOPOLOGY`, `cpu`."""
    gpus = [f"{kind.name} x{'|'.join(map(str, kind.gpus_per_machine))}" for kind in GPU_KINDS]
    return ["cpu", *gpus, *(f"{kind.name}-TOPOLOGY" for kind in TPU_KINDS)]


def _gpu_hardware(kind: GpuKind, count: int) -> Hardware:
    machine = next((machine for machine in kind.machines if machine.gpus == count), None)
    if machine is None:
        offered = " or ".join(f"{kind.name} x{number}" for number in kind.gpus_per_machine)
        raise InputError(
            f"no machine has {count} of these GPUs",
            field="launch.hardware",
            got=f"{kind.name} x{count}",
            hint=f"Choose {offered}",
        )
    return Hardware(
        name=f"{kind.name} x{count}",
        kind="gpu",
        machine=machine.name,
        resource="nvidia.com/gpu",
        accelerators=count,
        cpus=machine.cpus,
        memory_gib=machine.memory_gib,
        gpudirect=kind.gpudirect if count == max(kind.gpus_per_machine) else None,
        node_selector={"cloud.google.com/gke-accelerator": kind.gke_label},
    )


def _tpu_hardware(kind: TpuKind, topology: str) -> Hardware:
    if not kind.has_topology(topology):
        raise InputError(
            f"{kind.name} has no such slice",
            field="launch.hardware",
            got=f"{kind.name}-{topology}",
            hint=f"It has {kind.topology_rule}",
        )
    return Hardware(
        name=f"{kind.name}-{topology}",
        kind="tpu",
        machine=kind.machine_type(topology),
        resource="google.com/tpu",
        accelerators=kind.chips_per_host(topology),
        hosts=kind.host_count(topology),
        topology=topology,
        node_selector={
            "cloud.google.com/gke-tpu-accelerator": kind.gke_label,
            "cloud.google.com/gke-tpu-topology": topology,
        },
    )


def _suggest_name(text: str) -> str:
    first = text.partition(" ")[0]
    known = ["cpu", *(kind.name for kind in (*GPU_KINDS, *TPU_KINDS))]
    matches = [name for name in known if first and name.startswith(first)]
    matches = matches or difflib.get_close_matches(first, known, n=1)
    return f"Did you mean {matches[0]}? " if matches else ""
