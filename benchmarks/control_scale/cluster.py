"""Cluster of the benchmark: fake nodes, a namespace, JobSets written by hand, and clocks for their pods."""

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from benchmarks.failures.cluster_objects import fake_node, new_namespace
from benchmarks.harness import exit_unavailable

NAME = "control-scale"
GPU = "nvidia.com/gpu"
NODE_LABELS = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb", "podscale.dev/benchmark": NAME}
IMAGE = "registry.example/podscale-gpu:1"
"""Image of fake pods, which no node pulls."""
RUN_LABEL, STAGE_LABEL = "podscale.dev/run", "podscale.dev/stage"
JOBSET = ("jobset.x-k8s.io", "v1alpha2", "jobsets")
API_GROUPS = {JOBSET[0], "kueue.x-k8s.io"}
START = "make cluster-up WITH='jobset kueue kwok' starts one"
POD_SIZE = {"cpu": "44", "memory": "390Gi", "ephemeral-storage": "100Gi", GPU: "2"}
"""Requests of a pod, so that a node has room for four."""
WAIT_SECONDS = 3600.0

Manifest = dict[str, Any]


class Cluster:
    """Requests of the benchmark to a cluster with kwok."""

    def __init__(self, kubeconfig: Path) -> None:
        configuration = client.Configuration()
        try:
            config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        except (config.ConfigException, OSError):
            exit_unavailable(f"no cluster at {kubeconfig}: {START}")
        configuration.connection_pool_maxsize = 32
        self.kubeconfig = kubeconfig
        self.api = client.ApiClient(configuration)
        self.core = client.CoreV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)
        self._require_programs()

    def _require_programs(self) -> None:
        """Exit if the cluster does not answer, such as one that ended and left its files, or lacks JobSet or Kueue."""
        try:
            groups = {group.name for group in client.ApisApi(self.api).get_api_versions(_request_timeout=10).groups}
        except (ApiException, HTTPError):
            exit_unavailable(f"the cluster of {self.kubeconfig} does not answer: {START}")
        if missing := sorted(API_GROUPS - groups):
            exit_unavailable(f"the cluster of {self.kubeconfig} has no {' and no '.join(missing)}: {START}")

    def get(self, path: str, **query: str) -> Any:
        """Return the JSON of a GET, with few conversions, because some answers have many megabytes."""
        answer = self.api.call_api(
            path, "GET", query_params=list(query.items()), auth_settings=["BearerToken"], _preload_content=False
        )
        return json.loads(answer[0].data)

    def watch(self, path: str, **query: str) -> Iterator[bytes]:
        """Return the lines of a watch."""
        chosen = [*query.items(), ("watch", "true"), ("timeoutSeconds", "3600")]
        answer = self.api.call_api(
            path, "GET", query_params=chosen, auth_settings=["BearerToken"], _preload_content=False
        )
        return iter(answer[0])

    @contextlib.contextmanager
    def nodes(self, count: int) -> Iterator[float]:
        """Yield the seconds until that many fake nodes were ready; delete them afterwards."""
        started = time.monotonic()
        with ThreadPoolExecutor(16) as several:
            try:
                list(several.map(self._create_node, range(count)))
                selector = f"podscale.dev/benchmark={NAME}"
                try:
                    wait(lambda: self._ready_nodes(selector) == count, 120 + count / 10, "", poll=1 + count / 2000)
                except TimeoutError:
                    exit_unavailable(f"the fake nodes are not ready, so kwok does not run: {START}")
                yield time.monotonic() - started
            finally:
                list(several.map(self._delete_node, range(count)))

    def _ready_nodes(self, selector: str) -> int:
        """Return the number of nodes to which the scheduler may assign pods."""
        nodes = self.get("/api/v1/nodes", labelSelector=selector, resourceVersion="0")["items"]
        return sum(len(node["spec"].get("taints") or ()) == 2 for node in nodes)  # without that of a node not ready

    def _create_node(self, number: int) -> None:
        try:
            self.core.create_node(_node(number))
        except ApiException as error:
            if error.status != 409:  # left by an interrupted benchmark
                raise

    def _delete_node(self, number: int) -> None:
        with contextlib.suppress(ApiException):
            self.core.delete_node(_node_name(number))

    @contextlib.contextmanager
    def namespace(self) -> Iterator[str]:
        """Yield a namespace with a claim `workspace`; delete it with all runs, and wait until the pods are gone."""
        name = f"{NAME}-{int(time.time()) % 100000}"
        try:
            with new_namespace(self.core, name):
                yield name
        finally:
            wait(lambda: not self._has_namespace(name), WAIT_SECONDS, "the end of the namespace", poll=5)

    def _has_namespace(self, name: str) -> bool:
        try:
            self.core.read_namespace(name)
        except ApiException as error:
            return bool(error.status != 404)
        return True

    def create_jobset(self, namespace: str, manifest: Manifest) -> None:
        group, version, plural = JOBSET
        self.custom.create_namespaced_custom_object(group, version, namespace, plural, manifest)

    def delete_jobset(self, namespace: str, name: str) -> None:
        """Delete a JobSet and wait until its pods are gone."""
        group, version, plural = JOBSET
        self.custom.delete_namespaced_custom_object(
            group, version, namespace, plural, name, body={"propagationPolicy": "Background"}
        )
        path, selector = f"/api/v1/namespaces/{namespace}/pods", f"{RUN_LABEL}={name}"
        wait(
            lambda: not self.get(path, labelSelector=selector, resourceVersion="0")["items"], 900, f"the end of {name}"
        )

    def ready_pods(self, namespace: str, prefix: str) -> int:
        """Return the number of ready pods of the Jobs in the namespace whose names begin with the prefix."""
        jobs = self.get(f"/apis/batch/v1/namespaces/{namespace}/jobs", resourceVersion="0")["items"]
        chosen = [job for job in jobs if job["metadata"]["name"].startswith(prefix)]
        return sum(int(job["status"].get("ready") or 0) for job in chosen)

    def event_seconds(self, namespace: str) -> float:
        """Return the time of one request for the events of one object, which the launcher sends while a job waits.

        The object does not exist: the API server reads all events of the namespace all the same.
        """
        started = time.monotonic()
        self.get(f"/api/v1/namespaces/{namespace}/events", fieldSelector=f"involvedObject.name={NAME}")
        return time.monotonic() - started

    def event_count(self, namespace: str) -> int:
        answer = self.get(f"/api/v1/namespaces/{namespace}/events", limit="1")
        return len(answer["items"]) + int(answer["metadata"].get("remainingItemCount") or 0)


class StartClock:
    """Times of a run from watches that begin before it is submitted: its JobSet exists, all its pods have a node."""

    def __init__(self, cluster: Cluster, namespace: str, run: str, pods: int) -> None:
        self._pods = pods
        self._bound: set[str] = set()
        self._times: dict[str, float] = {}
        self._is_bound = threading.Event()
        group, version, plural = JOBSET
        jobs = f"/apis/{group}/{version}/namespaces/{namespace}/{plural}"
        pods_path = f"/api/v1/namespaces/{namespace}/pods"
        for lines, changed in (
            (cluster.watch(jobs, fieldSelector=f"metadata.name={run}"), self._job_changed),
            (cluster.watch(pods_path, labelSelector=f"{RUN_LABEL}={run}"), self._pod_changed),
        ):
            threading.Thread(target=self._read, args=(lines, changed), daemon=True).start()

    def wait(self) -> tuple[float, float]:
        """Return the monotonic times at which the JobSet existed and at which the last pod was bound."""
        if not self._is_bound.wait(900):
            raise TimeoutError(f"{len(self._bound)} of {self._pods} pods are bound after 15 minutes")
        return self._times["created"], self._times["bound"]

    def _read(self, lines: Iterator[bytes], changed: Callable[[Manifest], None]) -> None:
        for line in lines:
            changed(json.loads(line))
            if self._is_bound.is_set():
                return

    def _job_changed(self, change: Manifest) -> None:
        self._times.setdefault("created", time.monotonic())

    def _pod_changed(self, change: Manifest) -> None:
        pod = change["object"]
        if change["type"] in ("ADDED", "MODIFIED") and pod["spec"].get("nodeName"):
            self._bound.add(pod["metadata"]["uid"])
        if len(self._bound) == self._pods and not self._is_bound.is_set():
            self._times["bound"] = time.monotonic()
            self._is_bound.set()


def jobset(name: str, pods: int, queue: str = "") -> Manifest:
    """Return a JobSet as a person would write it, with our labels of a run and the resources of our pods."""
    labels = {RUN_LABEL: name, STAGE_LABEL: "train"}
    container = {
        "name": "train",
        "image": IMAGE,
        "command": ["torchrun", "--nproc-per-node=2", f"--nnodes={pods}", "train.py"],
        "resources": {"requests": POD_SIZE, "limits": POD_SIZE},
        "volumeMounts": [{"name": "workspace", "mountPath": "/workspace"}],
    }
    pod = {
        "restartPolicy": "Never",
        "nodeSelector": NODE_LABELS,
        "tolerations": [{"operator": "Exists", "effect": "NoSchedule"}],
        "containers": [container],
        "volumes": [{"name": "workspace", "persistentVolumeClaim": {"claimName": "workspace"}}],
    }
    job = {
        "parallelism": pods,
        "completions": pods,
        "backoffLimit": 0,
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    queued = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    return {
        "apiVersion": f"{JOBSET[0]}/{JOBSET[1]}",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {**labels, **queued}},
        "spec": {"replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}]},
    }


@contextlib.contextmanager
def queues(cluster: Cluster, namespace: str, unlimited: str, empty: str) -> Iterator[None]:
    """Create LocalQueues of Kueue in the namespace, one with quota for all pods and one without; delete them."""
    kinds = {"flavor": "resourceflavors", "cluster": "clusterqueues", "local": "localqueues"}
    group, version = "kueue.x-k8s.io", "v1beta2"
    labels = {"nodeLabels": {"podscale.dev/benchmark": NAME}}
    create, delete = cluster.custom.create_cluster_custom_object, cluster.custom.delete_cluster_custom_object
    head = {"apiVersion": f"{group}/{version}"}
    flavor = {**head, "kind": "ResourceFlavor", "metadata": {"name": NAME}, "spec": labels}
    try:
        create(group, version, kinds["flavor"], flavor)
        for name, quota in ((unlimited, "1000000Ti"), (empty, "0")):
            resources = [{"name": resource, "nominalQuota": quota} for resource in POD_SIZE]
            resource_group = {"coveredResources": list(POD_SIZE), "flavors": [{"name": NAME, "resources": resources}]}
            spec = {"namespaceSelector": {}, "resourceGroups": [resource_group]}
            named = {"metadata": {"name": f"{NAME}-{name}"}}
            create(group, version, kinds["cluster"], {**head, "kind": "ClusterQueue", **named, "spec": spec})
            local = {"metadata": {"name": name}, "spec": {"clusterQueue": f"{NAME}-{name}"}}
            cluster.custom.create_namespaced_custom_object(
                group, version, namespace, kinds["local"], {**head, "kind": "LocalQueue", **local}
            )
        yield
    finally:
        for kind, name in (("cluster", f"{NAME}-{unlimited}"), ("cluster", f"{NAME}-{empty}"), ("flavor", NAME)):
            with contextlib.suppress(ApiException):
                delete(group, version, kinds[kind], name)


@contextlib.contextmanager
def manifest_file(manifest: Manifest) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(manifest, file)
        file.flush()
        yield file.name


def wait(ready: Callable[[], bool], seconds: float, what: str, poll: float = 1.0) -> None:
    """Wait until `ready`. Raises TimeoutError after that many seconds."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(poll)


def _node_name(number: int) -> str:
    return f"{NAME}-{number}"


def _node(number: int) -> Manifest:
    """Return a fake node with eight GPUs and a label and taint of GKE's."""
    amounts = {"cpu": "208", "memory": "1872Gi", "ephemeral-storage": "6Ti", GPU: "8"}
    taints = [
        {"key": GPU, "value": "present", "effect": "NoSchedule"},
        {"key": "podscale.dev/benchmark", "value": NAME, "effect": "NoSchedule"},
    ]
    return fake_node(_node_name(number), amounts, NODE_LABELS, taints)
