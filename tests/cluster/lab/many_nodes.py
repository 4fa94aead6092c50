"""Settings of the controllers, the scheduler and kwok for thousands of fake nodes, and back to the usual ones.

Heartbeats of 10,000 nodes alone would be some 300 changes a second. Without them, the node controller must wait longer
before it takes a node for dead. The usual limits of 20 to 50 requests a second would measure the limits.
"""

import json
from pathlib import Path

from tests.cluster.lab import control_plane, fake_kubelet, places, processes
from tests.cluster.lab.pki import kubeconfig_of

CONTROLLER_FLAGS = (
    "--kube-api-qps=500",
    "--kube-api-burst=1000",
    "--concurrent-job-syncs=10",
    "--node-startup-grace-period=24h",
    "--node-monitor-grace-period=24h",
    "--node-monitor-period=60s",
)
NODES_TO_SCORE_PERCENT = 1
"""The scheduler stops its search for a node when it has found so many that fit; by default 5 % of 10,000."""
RESTARTED = ("kwok", "kube-scheduler", "kube-controller-manager")


def set_many_nodes(*, many: bool) -> None:
    """Restart controllers, scheduler and kwok with settings for many nodes, or with the usual ones."""
    for name in RESTARTED:
        processes.stop(name)
    if many:
        control_plane.start_controllers(CONTROLLER_FLAGS)
        control_plane.start_scheduler(_scheduler_configuration())
    else:
        control_plane.start_controllers()
        control_plane.start_scheduler()
    fake_kubelet.start(heartbeats=not many)


def _scheduler_configuration() -> Path:
    path = places.STATE / "scheduler.json"
    content = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig_of("scheduler")), "qps": 500, "burst": 1000},
        "percentageOfNodesToScore": NODES_TO_SCORE_PERCENT,
    }
    path.write_text(json.dumps(content))
    return path
