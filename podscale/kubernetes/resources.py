"""Kubernetes objects as dicts: the kinds that the launcher reads and writes, and the operators that provide them."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from urllib.parse import quote

KubernetesObject = dict[str, Any]
"""A Kubernetes object as the API server sends it."""


def name_of(item: KubernetesObject) -> str:
    return str(item["metadata"]["name"])


def uid_of(item: KubernetesObject) -> str:
    return str(item["metadata"]["uid"])


def title_of(item: KubernetesObject) -> str:
    """Return kind and name, such as `PyTorchJob r1`."""
    return f"{item['kind']} {name_of(item)}"


def labels_of(item: KubernetesObject) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def annotations_of(item: KubernetesObject) -> dict[str, str]:
    return item["metadata"].get("annotations") or {}


def conditions_of(item: KubernetesObject) -> dict[str, KubernetesObject]:
    """Return the conditions of an object's status by type."""
    return {str(condition["type"]): condition for condition in (item.get("status") or {}).get("conditions") or ()}


def is_being_deleted(item: KubernetesObject) -> bool:
    return "deletionTimestamp" in item["metadata"]


def creation_time(item: KubernetesObject) -> datetime:
    return datetime.fromisoformat(str(item["metadata"]["creationTimestamp"]))


def parse_quantity(text: object) -> Decimal:
    """Parse a quantity such as 100m, 1536Mi or 4; 0 if it is not one."""
    from kubernetes.utils.quantity import parse_quantity as parse

    try:
        return Decimal(parse(str(text)))
    except ValueError:
        return Decimal(0)


@dataclass(frozen=True)
class ResourceKind:
    """Kind of object. kubernetes.dynamic.Resource would need a request to find it, and does not quote names in URLs.

    Args:
        group: API group; "" is the core group.
        kind: as in manifests.
        plural: as in URLs.
        namespaced: False if the objects belong to the whole cluster.
    """

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full_name(self) -> str:
        """Name for RBAC and kubectl: pytorchjobs.kubeflow.org."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def root(self) -> str:
        """URL path of the group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, name: str | None = None, namespace: str | None = None, part: str = "") -> str:
        """Return the URL path of the collection, of one object, or of a part of it such as `log`."""
        scope = ("namespaces", namespace) if self.namespaced and namespace else ()
        segments = (*scope, self.plural, name, part)
        return "/".join((self.root, *(quote(segment, safe="") for segment in segments if segment)))


PODS = ResourceKind("", "v1", "Pod", "pods")
EVENTS = ResourceKind("", "v1", "Event", "events")
CONFIG_MAPS = ResourceKind("", "v1", "ConfigMap", "configmaps")
NAMESPACES = ResourceKind("", "v1", "Namespace", "namespaces", namespaced=False)
NODES = ResourceKind("", "v1", "Node", "nodes", namespaced=False)
RESOURCE_QUOTAS = ResourceKind("", "v1", "ResourceQuota", "resourcequotas")
VOLUME_CLAIMS = ResourceKind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
SERVICE_ACCOUNTS = ResourceKind("", "v1", "ServiceAccount", "serviceaccounts")
DEPLOYMENTS = ResourceKind("apps", "v1", "Deployment", "deployments")
STORAGE_CLASSES = ResourceKind("storage.k8s.io", "v1", "StorageClass", "storageclasses", namespaced=False)
ACCESS_REVIEWS = ResourceKind(
    "authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False
)
WORKLOADS = ResourceKind("kueue.x-k8s.io", "v1beta2", "Workload", "workloads")
LOCAL_QUEUES = ResourceKind("kueue.x-k8s.io", "v1beta2", "LocalQueue", "localqueues")

JOB_KINDS = {
    "pytorchjob": ResourceKind("kubeflow.org", "v1", "PyTorchJob", "pytorchjobs"),
    "jaxjob": ResourceKind("kubeflow.org", "v1", "JAXJob", "jaxjobs"),
    "trainjob": ResourceKind("trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs"),
    "jobset": ResourceKind("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets"),
    "job": ResourceKind("batch", "v1", "Job", "jobs"),
}
"""Kinds of job, by the name of the backend."""
STAGE_CONTAINERS = {
    "pytorchjob": "pytorch",
    "jaxjob": "jax",
    "trainjob": "node",
    "jobset": "podscale",
    "job": "podscale",
}
"""Name of the container that runs the stage, by backend; operators expect these names."""


@dataclass(frozen=True)
class KindProvider:
    """Operator that provides a kind of object: name, oldest sufficient version, command that installs it."""

    name: str
    version: str
    install: str


_TRAINING_OPERATOR = KindProvider(
    "Kubeflow Training Operator",
    "1.9",
    'kubectl apply --server-side -k "github.com/kubeflow/trainer.git/manifests/overlays/standalone?ref=v1.9.4"',
)
_TRAINER = KindProvider(
    "Kubeflow Trainer",
    "2.3",
    "helm install kubeflow-trainer oci://ghcr.io/kubeflow/charts/kubeflow-trainer --version 2.3.0 "
    "--namespace kubeflow-system --create-namespace",
)
_JOBSET = KindProvider(
    "JobSet",
    "0.12",
    "kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml",
)
_KUEUE = KindProvider(
    "Kueue",
    "0.15",
    "kubectl apply --server-side -f https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml",
)
KIND_PROVIDERS = {
    "kubeflow.org": _TRAINING_OPERATOR,
    "trainer.kubeflow.org": _TRAINER,
    "jobset.x-k8s.io": _JOBSET,
    "kueue.x-k8s.io": _KUEUE,
}
"""Operator that provides the kinds of an API group."""


def resource_of(manifest: KubernetesObject) -> ResourceKind:
    """Return the resource of a rendered object; a kind without an entry in the table gets its regular plural."""
    kind = str(manifest["kind"])
    group, _, version = str(manifest["apiVersion"]).rpartition("/")
    for known in JOB_KINDS.values():
        if (known.kind, known.group) == (kind, group):
            return known
    lower = kind.lower()
    plural = f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}es" if lower.endswith("s") else f"{lower}s"
    return ResourceKind(group, version, kind, plural)
