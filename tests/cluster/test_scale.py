"""Large jobs on fake nodes labelled as GKE's: 256 pods of a PyTorchJob on H100 machines, 64 hosts of four TPU slices.

kwok simulates the kubelets. The API server, the operators and the scheduler are real, and nothing computes. Labels and
taints are written here from GKE's documentation, not taken from Podscale.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.failures.cluster_objects import fake_node
from podscale.config import RunConfig
from podscale.config.document import dumps
from tests.cluster.cluster import Cluster
from tests.cluster.training import Training, document

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.cluster_full("jobset.x-k8s.io"),
    pytest.mark.usefixtures("fake_kubelets"),
]
WATCHED_SECONDS = 60
GPU_LABELS = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
TPU_LABELS = {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
    "cloud.google.com/gke-tpu-topology": "8x8",
}

# The launcher in a separate process, to measure its memory, its requests and the objects that it receives. It prints
# the figures of each time between two lines of its input.
LAUNCHER = """
import json, resource, sys, threading
from pathlib import Path
from podscale.config.document import load
from podscale.kubernetes import run_stage
from podscale.kubernetes.client import connect_cluster
from podscale.kubernetes.informer import Informer
from podscale.kubernetes.job_watcher import wait_for_job

received = 0
listed, changed = Informer._list, Informer._apply_change

def count_list(informer):
    global received
    version = listed(informer)
    received += len(informer.objects())
    return version

def count_change(informer, change):
    global received
    received += change["type"] != "BOOKMARK"
    return changed(informer, change)

Informer._list, Informer._apply_change = count_list, count_change
config = load(Path(sys.argv[1]))
api = connect_cluster(config.launch.cluster)
printer = run_stage.LinePrinter(sys.stderr)
found = run_stage.submit_stage(api, config, "train", None, printer)
waiting = threading.Thread(
    target=wait_for_job,
    args=(api, found.job),
    kwargs={"print_line": printer.line, "notify": printer.notify},
    daemon=True,
)
waiting.start()
while sys.stdin.readline():
    requests, objects = api.requests, received
    sys.stdin.readline()
    print(json.dumps({
        "requests": api.requests - requests,
        "objects": received - objects,
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "waiting": waiting.is_alive(),
    }), flush=True)
"""


@contextmanager
def fake_nodes(
    cluster: Cluster, count: int, resource: str, amount: int, labels: dict[str, str], pools: int = 1
) -> Iterator[None]:
    """Yield the nodes of several pools, with GKE's taint for such machines."""
    names = [f"fake-{resource.partition('/')[2]}-{number}" for number in range(count)]

    def add(number: int) -> None:
        pool = {"cloud.google.com/gke-nodepool": f"pool-{number * pools // count}"}
        amounts = {"cpu": "208", "memory": "1800Gi", "ephemeral-storage": "6Ti", resource: str(amount)}
        taint = {"key": resource, "value": "present", "effect": "NoSchedule"}
        cluster.core.create_node(fake_node(names[number], amounts, {**labels, **pool}, [taint]))

    with ThreadPoolExecutor(8) as several:
        try:
            list(several.map(add, range(count)))
            yield
        finally:
            list(several.map(cluster.core.delete_node, names))


class MeasuredLauncher:
    """Launcher of a run in another process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def usage_during(self, action: Callable[[], None]) -> Any:
        """Return requests, received objects and memory of the launcher while the action takes place."""
        self._line()
        action()
        self._line()
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def _line(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()


@contextmanager
def launcher(folder: Path, config: RunConfig) -> Iterator[MeasuredLauncher]:
    """Yield the launcher of a run, which submits the run."""
    path = folder / f"{config.run.id}.yaml"
    path.write_text(dumps(config))
    command = [sys.executable, "-c", LAUNCHER, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield MeasuredLauncher(process)
    finally:
        process.kill()
        process.wait()


def gpu_settings(nodes: int) -> tuple[str, ...]:
    return (
        *("launch.backend=pytorchjob", "launch.hardware=nvidia-h100-80gb x8", f"launch.nodes={nodes}"),
        *("launch.processes=8", f"train.global_batch={8 * nodes}", "launch.resources={}"),
    )


def test_256_pods_of_a_pytorchjob_are_scheduled_and_watched(cluster: Cluster, image: str, tmp_path: Path) -> None:
    with cluster.namespace("scale-gpu") as namespace, fake_nodes(cluster, 256, "nvidia.com/gpu", 8, GPU_LABELS):
        config = document(image, "large", *gpu_settings(256), f"launch.cluster.namespace={namespace}")
        try:
            with launcher(tmp_path, config) as measured:
                nodes = cluster.wait("256 running pods", lambda: _nodes_of_running(cluster, namespace, 256), poll=5)
                assert set(Counter(nodes).values()) == {1}
                usage = measured.usage_during(lambda: time.sleep(WATCHED_SECONDS))
        finally:
            cluster.delete(namespace, "kubeflow.org/v1", "PyTorchJob", "large")  # before the nodes of its pods
    print(usage)
    assert usage["waiting"]
    assert usage["mebibytes"] < 300
    assert usage["requests"] <= 10  # two watches of a minute each, and the log


def test_a_launcher_receives_only_the_changes_of_its_own_pods(cluster: Cluster, image: str, tmp_path: Path) -> None:
    """64 pods of another run in the same namespace start and end meanwhile."""
    with cluster.namespace("scale-two") as namespace, fake_nodes(cluster, 128, "nvidia.com/gpu", 8, GPU_LABELS):
        config = document(image, "watched", *gpu_settings(64), f"launch.cluster.namespace={namespace}")

        def running(count: int) -> None:
            cluster.wait(f"{count} pods", lambda: _nodes_of_running(cluster, namespace, count), poll=2)

        def another_run() -> None:
            other = Training(cluster, namespace, image, "other", "pytorchjob", *gpu_settings(64))
            running(128)
            other.delete()

        def own_pod() -> None:
            before = cluster.core.read_namespaced_pod("watched-worker-3", namespace).metadata.uid
            cluster.kill(namespace, "watched-worker-3")
            running(64)
            cluster.wait("its successor", lambda: before not in [pod.metadata.uid for pod in cluster.pods(namespace)])

        try:
            with launcher(tmp_path, config) as measured:
                running(64)
                time.sleep(10)  # until the job's own last changes have arrived
                others = measured.usage_during(another_run)
                own = measured.usage_during(own_pod)
        finally:
            cluster.delete(namespace, "kubeflow.org/v1", "PyTorchJob", "watched")
    print(others, own)
    assert others["objects"] == 0
    assert own["objects"] >= 3  # the deleted pod, its successor and the job


def test_64_hosts_of_four_slices_are_scheduled_each_slice_in_a_pool(cluster: Cluster, image: str) -> None:
    settings = ["launch.hardware=tpu-v5e-8x8", "launch.cluster.slices=4", "launch.nodes=1", "launch.processes=1"]
    settings += ["train.global_batch=1024", "launch.resources={}"]
    with (
        cluster.namespace("scale-tpu", security="privileged") as namespace,
        fake_nodes(cluster, 64, "google.com/tpu", 4, TPU_LABELS, pools=4),
    ):
        training = Training(cluster, namespace, image, "slices", "jobset", *settings)
        cluster.wait("64 running pods", lambda: _nodes_of_running(cluster, namespace, 64), poll=5)
        pools: dict[str, set[str]] = {}
        for pod in cluster.pods(namespace):
            node = cluster.core.read_node(pod.spec.node_name)
            pool = node.metadata.labels["cloud.google.com/gke-nodepool"]
            pools.setdefault(pod.metadata.labels["jobset.sigs.k8s.io/job-index"], set()).add(pool)
        training.delete()
        assert sorted(map(len, pools.values())) == [1, 1, 1, 1]
        assert len(set.union(*pools.values())) == 4


def _nodes_of_running(cluster: Cluster, namespace: str, count: int) -> list[str]:
    """Wait for this many running pods in the namespace, and return their nodes."""
    nodes = [pod.spec.node_name for pod in cluster.pods(namespace) if pod.status.phase == "Running"]
    return nodes if len(nodes) == count else []
