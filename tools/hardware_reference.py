"""Write docs/reference/hardware.md from the table in podscale/hardware: `python tools/hardware_reference.py`."""

from pathlib import Path

from podscale.hardware import GPU_KINDS, TPU_KINDS, GpuMachine, TpuKind, find_hardware
from podscale.hardware.lookup import POD_SHARE
from podscale.kubernetes.render.gpudirect import GPUDIRECT_NETWORKS

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "hardware.md"

HEAD = f"""# Hardware by name

GPU machines and TPU slices by the names that `launch.hardware` takes. Generated from `podscale/hardware/` by
`tools/hardware_reference.py`; a test keeps it true. Everything else about a pod follows from the name: which nodes, how
many accelerators, which taints it accepts, how many machines a TPU slice has. An impossible shape is refused, with the
possible ones listed. `cpu` asks for no accelerator; without `launch.hardware` the pods ask for what `launch.resources`
counts, on any node.

Each pod requests `launch.resources`, by default {POD_SHARE:.0%} of the machine's cores and memory; the node needs the
rest. Limits equal requests. There is one process per GPU, or one per TPU machine.
"""

GPU_HEAD = """## GPUs

The node label is `cloud.google.com/gke-accelerator`; sizes are in GiB.

| `launch.hardware` | node label | machine | vCPU | memory | Local SSD | GPUDirect |
|---|---|---|---|---|---|---|"""

TPU_HEAD = """## TPUs

A pod takes all chips of its machine, so a slice of several machines has as many pods. Only JobSet and TrainJob
schedule them together. `launch.cluster.slices` requests several slices of one topology (JobSet). A machine has four
chips, or one in a slice of one chip.

| `launch.hardware` | node label `cloud.google.com/gke-tpu-accelerator` | machine | topologies |
|---|---|---|---|"""

TAIL = """## Sources, and what was verified

Read in 2026: node labels, machine types, TPU topologies and GPUDirect of a machine, labels of reservations and Spot
VMs in xpk (AI-Hypercomputer/xpk, `src/xpk/core`); vCPUs and memory of the a2 machines and of a3-highgpu in SkyPilot's
catalogue; the label of placement groups in Google's documentation. Recalled and not read again: everything about g2
and n1 machines, vCPUs and memory of a3-mega, a3-ultra and a4, Local SSD, the resources that a node keeps for itself,
and the v5e slices of one and four chips.

An `n1` GPU can be on any n1 machine; the one in the table only sets the requests of a pod.

Nothing here ran on GKE, on a TPU, or with GPUDirect. A real API server with the operators' CustomResourceDefinitions
and webhooks accepts the objects in `manifests/jobs/`, and jobs on CPUs run to completion in a namespace that enforces
restricted Pod Security.

## Pod security

Jobs on CPUs and GPUs satisfy the `restricted` Pod Security Standard: uid 65532, no capabilities, no token of the
cluster, a read-only root file system with their own `/tmp` and `/dev/shm`. Jobs on TPUs and jobs with GPUDirect use
devices and paths of the host, so they need a namespace that allows `privileged` pods. All stages of such a run then
run as root, because other users cannot replace root's files. We read that Google requires less for TPU pods today;
`launch.cluster.security: restricted` tries it.

## GPUDirect

Over TCP, GPUs of different machines exchange gradients through the host's memory; for a network of ResNet-50's size
that is often fast enough. `launch.cluster.network: gpudirect` (for whole machines) configures the pods for NCCL's
plugin: TCPX, TCPXO or RDMA, depending on the machine. An administrator must install the plugin on the nodes first; its
own NCCL is then used. The cluster must have the networks below besides its own. If they have other names, set the
annotation `networking.gke.io/interfaces` in `launch.cluster.annotations`:
"""


def render() -> str:
    """Return the page."""
    gpus = [_gpu(kind.name, kind.gke_label, machine, kind.gpudirect) for kind in GPU_KINDS for machine in kind.machines]
    tpus = [
        f"| `{kind.name}-TOPOLOGY` | `{kind.gke_label}` | {_machines(kind)} | {kind.topology_rule} |"
        for kind in TPU_KINDS
    ]
    networks = [
        f"- {kind.upper()}: {', '.join(f'`{name}`' for name in names[1:])}"
        for kind, names in GPUDIRECT_NETWORKS.items()
    ]
    return "\n".join([HEAD, GPU_HEAD, *gpus, "", TPU_HEAD, *tpus, "", TAIL, *networks, ""])


def _machines(kind: TpuKind) -> str:
    return kind.machine if kind.single_chip_machine is None else f"{kind.machine}, {kind.single_chip_machine}"


def _gpu(name: str, label: str, machine: GpuMachine, direct: str | None) -> str:
    hardware = f"{name} x{machine.gpus}"
    gpudirect = (direct or "").upper() if find_hardware(hardware).gpudirect else ""
    ssd = f"{machine.local_ssd_gib:,}" if machine.local_ssd_gib else ""
    sizes = f"{machine.cpus} | {machine.memory_gib:,g} | {ssd}"
    return f"| `{hardware}` | `{label}` | {machine.name} | {sizes} | {gpudirect} |"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
