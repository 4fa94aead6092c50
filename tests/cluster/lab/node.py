"""Node: containerd, kubelet, kube-proxy, cluster DNS and volume provisioner."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from string import Template

from tests.cluster.lab import places, processes
from tests.cluster.lab.commands import attempt, wait_for
from tests.cluster.lab.pki import kubeconfig_of

TARGETS = {
    "kubelet.yaml": "kubelet.yaml",
    "containerd.toml": "containerd.toml",
    "cni.conflist": "cni/10-podscale.conflist",
    "kube-proxy.yaml": "kube-proxy.yaml",
    "Corefile": "Corefile",
}


def configure() -> None:
    """Write the configuration files that differ; kube-proxy exits when its file is written."""
    values = {"state": places.STATE, "run": places.RUN, "bridge": places.BRIDGE, "node_ip": places.NODE_IP}
    values |= {"pod_subnet": places.POD_SUBNET, "first_pod_ip": places.FIRST_POD_IP}
    for name, target in TARGETS.items():
        text, path = Template((places.ETC / name).read_text()).substitute(values), places.STATE / target
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def start_containers() -> None:
    """Start containerd, and wait until it accepts images."""
    places.RUN.mkdir(parents=True, exist_ok=True)
    processes.start("containerd", "containerd", "--config", places.STATE / "containerd.toml")
    wait_for("containerd", 30, lambda: ctr("version").returncode == 0, log=processes.log_of("containerd"))


def start() -> None:
    """Start the rest of the node, and wait until it is Ready."""
    kubelet = [f"--config={places.STATE / 'kubelet.yaml'}", f"--kubeconfig={kubeconfig_of('kubelet')}"]
    kubelet += [f"--root-dir={places.STATE / 'kubelet'}", f"--cert-dir={places.STATE / 'kubelet' / 'pki'}"]
    processes.start("kubelet", "kubelet", *kubelet, f"--hostname-override={places.NAME}", f"--node-ip={places.NODE_IP}")
    processes.start("kube-proxy", "kube-proxy", f"--config={places.STATE / 'kube-proxy.yaml'}")
    processes.start("coredns", "coredns", "-conf", places.STATE / "Corefile")
    processes.start("provisioner", sys.executable, "-m", "tests.cluster.lab.provisioner", cwd=places.ROOT)
    wait_for("the node", 120, ready, log=processes.log_of("kubelet"))


def ready() -> bool:
    path = '{.status.conditions[?(@.type=="Ready")].status}'
    return _of_node(path) == "True"


def reports(images: Iterable[str]) -> bool:
    """Return True if the node reports these images, some seconds after containerd has them."""
    return set(images) <= set(_of_node("{.status.images[*].names[*]}").split())


def _of_node(path: str) -> str:
    return attempt("kubectl", "get", "node", places.NAME, "-o", f"jsonpath={path}").stdout


def stop() -> None:
    """Stop the node: first the processes that would restart containers, then all containers, then containerd."""
    for name in ("provisioner", "coredns", "kube-proxy", "kubelet"):
        processes.stop(name)
    if processes.alive("containerd"):
        for task in ctr("tasks", "ls", "-q").stdout.split():
            ctr("tasks", "kill", "--all", "--signal", "KILL", task)
        for container in ctr("containers", "ls", "-q").stdout.split():
            ctr("tasks", "delete", "--force", container)
            ctr("containers", "delete", container)
    processes.stop("containerd")


def ctr(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return attempt("ctr", "--address", places.CONTAINERD_SOCKET, "--namespace", "k8s.io", *arguments)
