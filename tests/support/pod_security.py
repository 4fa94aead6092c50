"""Pod Security Standard `restricted`, implemented from its text (kubernetes.io, Pod Security Standards, v1.33).

It is independent of Podscale: it takes a pod's spec and returns the violations of the standard.
"""

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SECCOMP = {"RuntimeDefault", "Localhost"}
APPARMOR = {"RuntimeDefault", "Localhost", "", None}
SELINUX = {"", None, "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}


def violations(pod: dict[str, Any]) -> list[str]:
    """Return the violations of the restricted standard in a pod's spec; empty if it is admitted."""
    problems = [*_pod(pod)]
    for group in ("initContainers", "containers", "ephemeralContainers"):
        for container in pod.get(group, []):
            problems += [f"{container['name']}: {text}" for text in _container(pod, container)]
    return problems


def _pod(pod: dict[str, Any]) -> Iterator[str]:
    context = pod.get("securityContext", {})
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield name
    if pod.get("hostUsers") not in (None, True, False):
        yield "hostUsers"
    for volume in pod.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= VOLUMES:
            yield f"volume {volume['name']} is of kind {kinds}"
    for sysctl in context.get("sysctls", []):
        if sysctl["name"] not in SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    yield from _contexts(context)


def _contexts(context: dict[str, Any]) -> Iterator[str]:
    """Yield violations in the fields that the security contexts of pods and containers share."""
    if context.get("runAsUser") == 0:
        yield "runAsUser 0"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess"
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type") not in SELINUX or selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions"
    if context.get("appArmorProfile", {}).get("type") not in APPARMOR:
        yield "appArmorProfile"
    if "seccompProfile" in context and context["seccompProfile"].get("type") not in SECCOMP:
        yield "seccompProfile"


def _container(pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    context, around = container.get("securityContext", {}), pod.get("securityContext", {})
    yield from _contexts(context)
    if context.get("privileged"):
        yield "privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if context.get("procMount") not in (None, "Default"):
        yield "procMount"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "hostPort"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities are not dropped"
    if not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}:
        yield f"capabilities added: {capabilities['add']}"
    if context.get("runAsNonRoot", around.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot is not true"
    if "seccompProfile" not in context and "seccompProfile" not in around:
        yield "no seccompProfile"
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        for handler in container.get(probe, {}).values():
            if isinstance(handler, dict) and handler.get("host"):
                yield f"{probe} names a host"
