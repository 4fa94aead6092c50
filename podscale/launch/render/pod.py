"""The pod that every kind of job makes: image, command, document, volumes, security, and where it may run.

It fits the `restricted` Pod Security Standard unless the hardware needs more: no root, no capabilities, a read-only
root file system with memory and disk only where they are needed, and no token of the cluster.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from podscale.launch import termination
from podscale.launch.jobspec import METRICS_PORT, JobSpec
from podscale.launch.render import direct, placement, volumes
from podscale.launch.render.volumes import USER_ID, gib_quantity
from podscale.util import env

KILL_MARGIN_SECONDS = 30
"""Beyond the grace time of the ranks: the supervisor kills what is left, records the end and tells it."""
JAX_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""JAX_PLATFORMS by hardware: accelerators that cannot be had end the run, which would else go on with CPUs, unseen; and
where none are asked for, libtpu does not look for them."""
TPU_PORTS = {"tpu": 8471, "tpu-metrics": 8431}
"""Where the hosts of a slice reach each other, and where libtpu tells how its chips are (both are libtpu's own)."""
MEGASCALE_PORT = {"megascale": 8080}
"""Where slices reach each other (GKE's MEGASCALE_COORDINATOR_ADDRESS)."""
NVIDIA_LIBRARIES = "/usr/local/nvidia/lib64"
"""Where GKE's device plugin mounts the driver's libraries (recalled)."""


def pod_template(
    spec: JobSpec,
    container: str,
    *,
    environment: Iterable[Mapping[str, Any]] = (),
    ports: dict[str, int] | None = None,
    restart: str | None = None,
) -> dict[str, Any]:
    """The template of a pod whose main container is named `container`.

    environment: further variables, as Kubernetes writes them. ports: further ports by name. restart: restartPolicy,
    where the kind of job leaves it to the pod.
    """
    pod: dict[str, Any] = {"restartPolicy": restart} if restart else {}
    pod |= {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(spec.grace_seconds) + KILL_MARGIN_SECONDS,
        "securityContext": pod_security(spec),
    }
    pod |= placement.pod_placement(spec)
    if daemons := direct.gpudirect_daemons(spec):
        pod["initContainers"] = daemons
    pod["containers"] = [_container(spec, container, environment, ports or {})]
    pod["volumes"] = [*volumes.pod_volumes(spec), *direct.gpudirect_volumes(spec)]
    annotations = {
        **volumes.volume_annotations(spec),
        **placement.placement_annotations(spec),
        **direct.gpudirect_annotations(spec),
    }
    return {
        "metadata": {"labels": spec.labels, "annotations": {**annotations, **spec.cluster.annotations}},
        "spec": pod,
    }


def pod_security(spec: JobSpec) -> dict[str, Any]:
    """Of the pod: who its processes are, and the system calls they may make."""
    if spec.security_mode == "privileged":
        return {"runAsUser": 0, "fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(spec: JobSpec) -> dict[str, Any]:
    """Of the container: nothing beyond its own files, except where devices of the host are needed."""
    if spec.security_mode == "privileged":
        return {"privileged": spec.needs_accelerators, "readOnlyRootFilesystem": True}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def container_resources(spec: JobSpec) -> dict[str, Any]:
    """Requests and limits are the same, so that pods are the last that a node in need evicts."""
    demand, amounts = spec.resources, {}
    if demand.cpus:
        amounts["cpu"] = f"{demand.cpus:g}"
    if demand.memory_gib:
        amounts["memory"] = gib_quantity(demand.memory_gib)
    amounts["ephemeral-storage"] = gib_quantity(demand.ephemeral_gib)
    if demand.accelerators and demand.resource:
        amounts[demand.resource] = str(demand.accelerators)
    return {"requests": amounts, "limits": dict(amounts)}


def value_variable(name: str, text: object) -> dict[str, Any]:
    """A variable with a value."""
    return {"name": name, "value": str(text)}


def field_variable(name: str, path: str) -> dict[str, Any]:
    """A variable with a field of the pod, such as a label."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _container(
    spec: JobSpec, name: str, environment: Iterable[Mapping[str, Any]], ports: dict[str, int]
) -> dict[str, Any]:
    container: dict[str, Any] = {"name": name, "image": spec.image}
    if spec.cluster.image_pull_policy:
        container["imagePullPolicy"] = spec.cluster.image_pull_policy
    serving = {} if spec.stage == "report" else {"metrics": METRICS_PORT}
    numbers = ports | _tpu_ports(spec) | serving
    listed = [{"name": port, "containerPort": number, "protocol": "TCP"} for port, number in numbers.items()]
    container |= {
        "command": direct.gpudirect_command(spec),
        "env": _container_environment(spec, environment),
        "resources": container_resources(spec),
    }
    if listed:
        container["ports"] = listed
    container |= {
        "securityContext": container_security(spec),
        "volumeMounts": [*volumes.container_mounts(spec), *direct.gpudirect_mounts(spec)],
        "terminationMessagePath": termination.TERMINATION_PATH,
        "terminationMessagePolicy": "File",
    }
    return container


def _tpu_ports(spec: JobSpec) -> dict[str, int]:
    """For people and admission policies: pods of the job reach each other on every port."""
    if spec.hardware.kind != "tpu":
        return {}
    return TPU_PORTS | MEGASCALE_PORT if spec.slices > 1 else TPU_PORTS


def _container_environment(spec: JobSpec, more: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Ours, then what the document adds or says otherwise (it cannot name what jobs are held together by)."""
    found = [
        value_variable(env.RUN_DOCUMENT, spec.document),
        value_variable(env.TERMINATION_LOG, termination.TERMINATION_PATH),
        value_variable("HOME", volumes.TEMPORARY_PATH),
        *more,
    ]
    if spec.engine == "jax" and spec.needs_accelerators:
        found.append(value_variable("JAX_PLATFORMS", JAX_PLATFORMS[spec.hardware.kind]))
    if spec.hardware.kind == "gpu":
        found.append(value_variable("LD_LIBRARY_PATH", direct.library_path(spec, NVIDIA_LIBRARIES)))
        found += [value_variable("NCCL_DEBUG", "WARN")] if spec.nodes > 1 else []
    found += direct.gpudirect_environment(spec)
    kept = [entry for entry in found if entry["name"] not in spec.cluster.env]
    return [*kept, *(value_variable(name, text) for name, text in spec.cluster.env.items())]
