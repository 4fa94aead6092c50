"""Paths and addresses: the cluster's state, files kept between clusters, and the node's addresses."""

import os
from pathlib import Path

NAME = "podscale"
ROOT = Path(__file__).resolve().parents[3]
ETC = Path(__file__).resolve().parent / "etc"

STATE = Path("/var/lib/podscale-cluster")  # gone after `down`
RUN = Path("/run/podscale-cluster")
PKI = STATE / "pki"
KUBECONFIG = STATE / "admin.kubeconfig"
VOLUMES = STATE / "volumes"
CONTAINERD_SOCKET = RUN / "containerd.sock"

# Address of the whole node: the pods' bridge, the API server, the kubelet, DNS.
BRIDGE = "podscale0"
NODE_IP = "10.117.0.1"
POD_SUBNET = "10.117.0.0/24"
FIRST_POD_IP = "10.117.0.10"
SERVICE_SUBNET = "10.118.0.0/16"
API_SERVICE_IP = "10.118.0.1"
ETCD_URL = "http://127.0.0.1:12379"
ETCD_PEER_URL = "http://127.0.0.1:12380"


def cache() -> Path:
    """Return the folder of files that outlive a cluster (programs, images), outside the tree; `clean` removes it."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "podscale-cluster"


def bin_dir() -> Path:
    return cache() / "bin"


def image_dir() -> Path:
    return cache() / "images"
