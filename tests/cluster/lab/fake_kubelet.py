"""kwok as a process, which simulates the kubelets of nodes with its annotation.

Pods on these nodes run until they are deleted; by default, kwok would complete the pods of Jobs at once. Their log is
one line, and a reader who follows it waits for more, as with a training that prints nothing.
"""

from datetime import UTC, datetime

import yaml

from tests.cluster.lab import places, processes, programs

STAGES = ("node/fast/node-initialize", "pod/fast/pod-ready", "pod/fast/pod-delete")
HEARTBEAT = "node/heartbeat/node-heartbeat"
"""A change of each node every 20 to 45 seconds, without which the node controller takes it for dead."""
LOG_PORT = 10247


def start(*, heartbeats: bool = True) -> None:
    """Start kwok unless it runs."""
    if processes.alive("kwok"):
        return
    configuration = places.STATE / "kwok.yaml"
    configuration.write_text("\n---\n".join([*_stages(heartbeats), yaml.safe_dump(_logs())]))
    processes.start(
        "kwok",
        "kwok",
        f"--config={configuration}",
        "--v=WARN",
        "--manage-all-nodes=false",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        f"--kubeconfig={places.KUBECONFIG}",
        "--cidr=10.119.0.0/16",
        f"--node-ip={places.NODE_IP}",
        f"--node-port={LOG_PORT}",
        f"--server-address={places.NODE_IP}:{LOG_PORT}",
        f"--tls-cert-file={places.PKI / 'fake-kubelet.crt'}",
        f"--tls-private-key-file={places.PKI / 'fake-kubelet.key'}",
    )


def _stages(heartbeats: bool) -> list[str]:
    folder = programs.module_files("kwok") / "kustomize" / "stage"
    names = (*STAGES, HEARTBEAT) if heartbeats else STAGES
    return [(folder / f"{name}.yaml").read_text() for name in names]


def _logs() -> dict[str, object]:
    """Return the log of all fake pods, in the format of a container runtime."""
    log = places.STATE / "fake-pod.log"
    log.write_text(f"{datetime.now(UTC).isoformat().replace('+00:00', 'Z')} stdout F a fake pod runs\n")
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "ClusterLogs",
        "metadata": {"name": "all"},
        "spec": {"logs": [{"logsFile": str(log), "follow": True}]},
    }
