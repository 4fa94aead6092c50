"""Cluster under test, accessed by the plain client library, independently of Podscale's launcher."""

import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.stream import stream
from urllib3.exceptions import HTTPError

from benchmarks.failures.cluster_objects import new_namespace
from tests.cluster.lab import places

Manifest = dict[str, Any]
USER = 65532
WAIT_SECONDS = 300.0
"""Time limit for any event on two busy cores, seconds."""


def kubeconfig() -> Path | None:
    """Return the kubeconfig of the cluster under test, or None: that of KUBECONFIG, or the lab's own.

    Tests use a cluster other than the lab's only if PODSCALE_TEST_CLUSTER=1, which `make cluster-test` sets and `make
    test` does not.
    """
    named, lab = os.environ.get("KUBECONFIG"), places.KUBECONFIG
    if named and (os.environ.get("PODSCALE_TEST_CLUSTER") == "1" or Path(named) == lab):
        return Path(named)
    return lab if os.access(lab, os.R_OK) else None


def connect(kubeconfig: str) -> "Cluster | None":
    """Return the cluster of the file's current context, or None if it does not answer."""
    configuration = client.Configuration()
    configuration.retries = 1
    try:
        config.load_kube_config(kubeconfig, client_configuration=configuration)
        return Cluster(client.ApiClient(configuration))
    except (ApiException, HTTPError, config.ConfigException):
        return None


@dataclass
class Cluster:
    """Operations of tests on a cluster."""

    api: client.ApiClient
    core: client.CoreV1Api = field(init=False)
    dynamic: DynamicClient = field(init=False)
    groups: frozenset[str] = field(init=False)
    _served: "tempfile.TemporaryDirectory[str]" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.core = client.CoreV1Api(self.api)
        self.groups = frozenset(group.name for group in client.ApisApi(self.api).get_api_versions().groups)
        # The client caches the served APIs by address, and successive lab clusters have the same address.
        self._served = tempfile.TemporaryDirectory()
        self.dynamic = DynamicClient(self.api, cache_file=f"{self._served.name}/served.json")

    @contextlib.contextmanager
    def namespace(self, prefix: str, *, security: str = "restricted") -> Iterator[str]:
        """Yield a namespace that enforces this Pod Security Standard, with a claim `workspace`; deleted afterwards."""
        labels = {"pod-security.kubernetes.io/enforce": security}
        name = f"{prefix.replace('_', '-')[:40]}-{uuid.uuid4().hex[:6]}"
        with new_namespace(self.core, name, labels):
            yield name

    @property
    def is_lab(self) -> bool:
        """Return True if it is the cluster of tests/cluster/lab, whose images are local."""
        return str(self.api.configuration.host) == f"https://{places.NODE_IP}:6443"

    def has_image(self, name: str) -> bool:
        """Return True if a node has the image; an image with a registry is assumed to be available."""
        if not name.startswith("localhost/"):
            return True
        nodes = self.core.list_node().items
        return any(name in (image.names or ()) for node in nodes for image in node.status.images or ())

    def create(self, namespace: str, manifest: Manifest) -> Any:
        """Create an object, without namespace if it is cluster-scoped."""
        return self._resource(manifest["apiVersion"], manifest["kind"]).create(manifest, namespace=namespace or None)

    def all_of(self, namespace: str, api_version: str, kind: str) -> list[Manifest]:
        items: list[Manifest] = self._resource(api_version, kind).get(namespace=namespace).to_dict()["items"]
        return items

    def get(self, namespace: str, api_version: str, kind: str, name: str) -> Any:
        return self._resource(api_version, kind).get(name, namespace=namespace).to_dict()

    def get_raw(self, path: str, **query: str) -> str:
        """Return the body of a GET, or an empty one on an error: a service behind the proxy may not be ready yet."""
        try:
            answer = self.api.call_api(
                path, "GET", query_params=list(query.items()), auth_settings=["BearerToken"], _preload_content=False
            )
        except ApiException:
            return ""
        return bytes(answer[0].data).decode()

    def patch_status(self, namespace: str, api_version: str, kind: str, name: str, status: Manifest) -> None:
        """Merge into the status of an object, as its controller would."""
        options = {"name": name, "namespace": namespace or None, "content_type": "application/merge-patch+json"}
        self._resource(api_version, kind).status.patch(body={"status": status}, **options)

    def delete(self, namespace: str, api_version: str, kind: str, name: str) -> None:
        """Delete the object and wait until it and its dependents are gone."""
        resource = self._resource(api_version, kind)
        resource.delete(name, namespace=namespace or None, body={"propagationPolicy": "Foreground"})

        def gone() -> bool:
            try:
                resource.get(name, namespace=namespace or None)
            except ApiException as error:
                return bool(error.status == 404)
            return False

        self.wait(f"the end of {kind} {name}", gone)

    def pods(self, namespace: str, selector: str = "") -> list[Any]:
        """Return the namespace's pods, sorted by name."""
        items = self.core.list_namespaced_pod(namespace, label_selector=selector).items
        return sorted(items, key=lambda pod: str(pod.metadata.name))

    def logs(self, namespace: str, pod: str, **options: Any) -> str:
        """Return the pod's log so far; empty if the pod has not started."""
        try:
            raw = self.core.read_namespaced_pod_log(pod, namespace, _preload_content=False, **options)
        except ApiException as error:
            return f"(no log: {error.reason})"
        return bytes(raw.data).decode("utf-8", "replace")

    def evict(self, namespace: str, pod: str) -> None:
        """Evict a pod as draining a node does: SIGTERM and the pod's own grace period."""
        self.core.create_namespaced_pod_eviction(pod, namespace, {"metadata": {"name": pod, "namespace": namespace}})

    def kill(self, namespace: str, pod: str) -> None:
        """Delete a pod without a grace period, as if its node had failed."""
        self.core.delete_namespaced_pod(pod, namespace, grace_period_seconds=0)

    def wait(self, what: str, ready: Callable[[], Any], seconds: float = WAIT_SECONDS, poll: float = 0.5) -> Any:
        """Return the result of `ready` as soon as it is true. Fails after this many seconds."""
        deadline = time.monotonic() + seconds
        while not (result := ready()):
            assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
            time.sleep(poll)
        return result

    def run(self, namespace: str, image: str, *command: str, workspace: str = "/workspace") -> str:
        """Run a command in a new pod that mounts the claim `workspace`; return its output."""
        name = f"run-{uuid.uuid4().hex[:8]}"
        self.core.create_namespaced_pod(namespace, plain_pod(name, image, list(command), workspace))
        ended = ("Succeeded", "Failed")
        pod = self.wait(f"pod {name}", lambda: self.pod_in(namespace, name, ended))
        log = self.logs(namespace, name)
        assert pod.status.phase == "Succeeded", f"{command} failed: {log}"
        self.core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
        return log

    @contextlib.contextmanager
    def loaded(self, namespace: str, image: str, command: list[str]) -> Iterator[Callable[[], str]]:
        """Run a command in a pod beside the block; yield a function that returns its output, after the block."""
        name, output = f"load-{uuid.uuid4().hex[:8]}", list[str]()
        self.core.create_namespaced_pod(namespace, plain_pod(name, image, command))
        try:
            self.wait(f"pod {name}", lambda: self.pod_in(namespace, name, ("Running",)))
            yield lambda: output[0]
            self.wait(f"pod {name}", lambda: self.pod_in(namespace, name, ("Succeeded", "Failed")))
            output.append(self.logs(namespace, name))
        finally:
            self.core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)

    def execute(self, namespace: str, pod: str, *command: str) -> str:
        """Run a command inside a running pod; return its output.

        `stream` turns all requests of its client into WebSockets meanwhile, so it gets a client of its own.
        """
        attach = client.CoreV1Api(client.ApiClient(self.api.configuration)).connect_get_namespaced_pod_exec
        options = {"stdin": False, "stdout": True, "stderr": True, "tty": False}
        return str(stream(attach, pod, namespace, command=list(command), **options))

    def events(self, namespace: str) -> str:
        """Return the namespace's events as text, for the messages of failed tests."""
        items = self.core.list_namespaced_event(namespace).items
        return "\n".join(f"{event.involved_object.name}: {event.reason}: {event.message}" for event in items)

    def pod_in(self, namespace: str, name: str, phases: tuple[str, ...]) -> Any:
        """Return the pod if it is in one of these phases, else None."""
        pod = self.core.read_namespaced_pod(name, namespace)
        return pod if pod.status.phase in phases else None

    def _resource(self, api_version: str, kind: str) -> Any:
        return self.dynamic.resources.get(api_version=api_version, kind=kind)


def plain_pod(name: str, image: str, command: list[str], workspace: str = "/workspace") -> Manifest:
    """Return a pod that Pod Security "restricted" admits, with the claim `workspace`."""
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "securityContext": security,
        "volumeMounts": [{"name": "workspace", "mountPath": workspace}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 5,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                {"name": "workspace", "persistentVolumeClaim": {"claimName": "workspace"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }
