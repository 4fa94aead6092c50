"""GPUDirect on GKE: devices, host paths, daemons and variables with which NCCL bypasses the host's memory.

They follow xpk (AI-Hypercomputer/xpk, src/xpk/core/workload_decorators at 367c838). The names of the networks are those
of Google's guides; for others set the annotation networking.gke.io/interfaces in launch.cluster.annotations. None of
this has been run (docs/reference/hardware.md). "Recalled" marks values written from memory.
"""

import json
from typing import Any

from podscale.kubernetes.job_spec import JobSpec

GPUDIRECT_NETWORKS = {
    "tcpx": ("default", "vpc1", "vpc2", "vpc3", "vpc4"),
    "tcpxo": ("default", *(f"vpc{number}" for number in range(1, 9))),
    "rdma": ("default", "gvnic-1", *(f"rdma-{number}" for number in range(8))),
}
"""Networks of a machine, in the order of its interfaces."""
NCCL_PROFILES = {
    "tcpx": "",
    "tcpxo": "/usr/local/nvidia/lib64/nccl-env-profile.sh",
    "rdma": "/usr/local/gib/scripts/set_nccl_env.sh",
}
"""Path of the plugin's script that sets NCCL's variables for the machine (recalled)."""
TCPX_IMAGE = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.11"
TCPXO_IMAGE = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.12"
TCPX_VARIABLES = {
    "NCCL_NET": "GPUDirectTCPX_v7",
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_CROSS_NIC": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2,eth3,eth4",
    "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
    "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": "/run/tcpx",
}
"""NCCL's variables for TCPX, which has no such script (recalled)."""

ObjectList = list[dict[str, Any]]


def gpudirect_command(spec: JobSpec) -> list[str]:
    """Return the command of the stage, preceded by the plugin's settings script if it has one."""
    profile = NCCL_PROFILES.get(spec.gpudirect or "", "")
    if not profile:
        return list(spec.command)
    return ["sh", "-c", f'. {profile} && exec "$@"', "sh", *spec.command]


def gpudirect_environment(spec: JobSpec) -> ObjectList:
    if spec.gpudirect == "tcpx":
        return _environment_list(TCPX_VARIABLES)
    if spec.gpudirect == "tcpxo":
        variables = {
            "NCCL_LIB_DIR": "/usr/local/nvidia/lib64",
            "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
        }
        return _environment_list(variables)
    # without NCCL_NET, NCCL silently falls back to TCP if the plugin is missing
    return _environment_list({"NCCL_NET": "gIB"}) if spec.gpudirect == "rdma" else []


def library_path(spec: JobSpec, libraries: str) -> str:
    """Return LD_LIBRARY_PATH: `libraries`, and those of GPUDirect."""
    return f"{libraries}:/usr/local/gib/lib64" if spec.gpudirect == "rdma" else libraries


def gpudirect_annotations(spec: JobSpec) -> dict[str, str]:
    """Return the pod annotations: network interfaces, and the devices of the daemon."""
    if spec.gpudirect is None:
        return {}
    interfaces = [
        {"interfaceName": f"eth{n}", "network": name} for n, name in enumerate(GPUDIRECT_NETWORKS[spec.gpudirect])
    ]
    annotations = {
        "networking.gke.io/default-interface": "eth0",
        "networking.gke.io/interfaces": json.dumps(interfaces, separators=(",", ":")),
    }
    devices = [*(f"/dev/nvidia{number}" for number in range(8)), "/dev/nvidiactl", "/dev/nvidia-uvm"]
    if spec.gpudirect == "tcpxo":
        devices.append("/dev/dmabuf_import_helper")
    if spec.gpudirect in ("tcpx", "tcpxo"):
        paths = "".join(f"- path: {device}\n" for device in devices)
        annotations[f"devices.gke.io/container.{spec.gpudirect}-daemon"] = paths
    return annotations


def gpudirect_volumes(spec: JobSpec) -> ObjectList:
    return [{"name": name, "hostPath": {"path": path}} for name, path, _, _ in _paths(spec)]


def gpudirect_mounts(spec: JobSpec) -> ObjectList:
    return [{"name": name, "mountPath": inside} for name, _, inside, _ in _paths(spec) if inside]


def gpudirect_daemons(spec: JobSpec) -> ObjectList:
    """Return the sidecar containers (init containers that keep running)."""
    if spec.gpudirect not in ("tcpx", "tcpxo"):
        return []
    return [_tcpx_daemon(spec) if spec.gpudirect == "tcpx" else _tcpxo_daemon(spec)]


def _paths(spec: JobSpec) -> list[tuple[str, str, str, str]]:
    """Return name, host path, path in the training container, path in the daemon of each volume; "" for none."""
    library = "/usr/local/nvidia"
    if spec.gpudirect == "rdma":
        return [("gib", "/home/kubernetes/bin/gib", "/usr/local/gib", "")]
    if spec.gpudirect is None:
        return []
    system = [("sys", "/sys", "", "/hostsysfs"), ("proc-sys", "/proc/sys", "", "/hostprocsysfs")]
    nvidia = ("nvidia", "/home/kubernetes/bin/nvidia", library, library)
    if spec.gpudirect == "tcpx":
        return [nvidia, ("tcpx-socket", "/run/tcpx", "/run/tcpx", "/run/tcpx"), *system]
    return [nvidia, ("aperture-devices", "/dev/aperture_devices", "/dev/aperture_devices", ""), *system]


def _daemon(spec: JobSpec, image: str, command: list[str], capabilities: list[str]) -> dict[str, Any]:
    return {
        "name": f"{spec.gpudirect}-daemon",
        "image": image,
        "restartPolicy": "Always",
        "command": command,
        "env": _environment_list({"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"}),
        "securityContext": {"capabilities": {"add": capabilities}},
        "volumeMounts": [{"name": name, "mountPath": inside} for name, _, _, inside in _paths(spec) if inside],
    }


def _tcpx_daemon(spec: JobSpec) -> dict[str, Any]:
    command = ["/tcpgpudmarxd/build/app/tcpgpudmarxd", "--gpu_nic_preset", "a3vm", "--gpu_shmem_type", "fd"]
    command += ["--uds_path", "/run/tcpx", "--setup_param", "--verbose 128 2 0"]
    return _daemon(spec, TCPX_IMAGE, command, ["NET_ADMIN"])


def _tcpxo_daemon(spec: JobSpec) -> dict[str, Any]:
    script = "chmod 755 /fts/entrypoint_rxdm_container.sh && exec /fts/entrypoint_rxdm_container.sh"
    command = ["sh", "-c", f"{script} --num_hops=2 --num_nics=8 --uid= --alsologtostderr"]
    return _daemon(spec, TCPXO_IMAGE, command, ["NET_ADMIN", "NET_BIND_SERVICE"])


def _environment_list(variables: dict[str, str]) -> ObjectList:
    return [{"name": name, "value": value} for name, value in variables.items()]
