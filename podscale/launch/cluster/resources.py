"""The kinds of objects that the launcher asks an API server for, and what has to be installed to have them."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from podscale.launch.backends import BACKENDS
from podscale.launch.jobspec import NAME_LABEL as NAME_LABEL
from podscale.launch.jobspec import RUN_LABEL as RUN_LABEL
from podscale.launch.jobspec import STAGE_LABEL as STAGE_LABEL

Object = dict[str, Any]
"""A Kubernetes object as the API server sends it."""


@dataclass(frozen=True)
class Resource:
    """One kind of object: its API group ('' is the core group), version, kind, and plural as it stands in URLs."""

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
        """As RBAC and people name it: pytorchjobs.kubeflow.org."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def root(self) -> str:
        """The URL path of its group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str, name: str = "", part: str = "") -> str:
        """The URL path of the collection, of one object, or of a part of it such as `log`."""
        where = f"/namespaces/{quote(namespace, safe='')}" if self.namespaced else ""
        rest = "".join(f"/{quote(word, safe='')}" for word in (name, part) if word)
        return f"{self.root}{where}/{self.plural}{rest}"


PODS = Resource("", "v1", "Pod", "pods")
EVENTS = Resource("", "v1", "Event", "events")
CONFIG_MAPS = Resource("", "v1", "ConfigMap", "configmaps")
NAMESPACES = Resource("", "v1", "Namespace", "namespaces", namespaced=False)
NODES = Resource("", "v1", "Node", "nodes", namespaced=False)
QUOTAS = Resource("", "v1", "ResourceQuota", "resourcequotas")
CLAIMS = Resource("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
SERVICE_ACCOUNTS = Resource("", "v1", "ServiceAccount", "serviceaccounts")
DEPLOYMENTS = Resource("apps", "v1", "Deployment", "deployments")
STORAGE_CLASSES = Resource("storage.k8s.io", "v1", "StorageClass", "storageclasses", namespaced=False)
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False
)
WORKLOADS = Resource("kueue.x-k8s.io", "v1beta2", "Workload", "workloads")
LOCAL_QUEUES = Resource("kueue.x-k8s.io", "v1beta2", "LocalQueue", "localqueues")

JOB_KINDS = {name: Resource(kind.group, kind.version, kind.kind, kind.plural) for name, kind in BACKENDS.items()}
"""Everything that a stage can run as, by the name of the backend."""


@dataclass(frozen=True)
class Provider:
    """What has to be installed for a kind of object: name, oldest version that is enough, and how to get it."""

    name: str
    version: str
    install: str


_TRAINING_OPERATOR = Provider(
    "Kubeflow Training Operator",
    "1.9",
    'kubectl apply --server-side -k "github.com/kubeflow/trainer.git/manifests/overlays/standalone?ref=v1.9.4"',
)
_TRAINER = Provider(
    "Kubeflow Trainer",
    "2.3",
    "helm install kubeflow-trainer oci://ghcr.io/kubeflow/charts/kubeflow-trainer --version 2.3.0 "
    "--namespace kubeflow-system --create-namespace",
)
_JOBSET = Provider(
    "JobSet",
    "0.12",
    "kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml",
)
_KUEUE = Provider(
    "Kueue",
    "0.15",
    "kubectl apply --server-side -f https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml",
)
PROVIDERS = {
    "kubeflow.org": _TRAINING_OPERATOR,
    "trainer.kubeflow.org": _TRAINER,
    "jobset.x-k8s.io": _JOBSET,
    "kueue.x-k8s.io": _KUEUE,
}
"""Who brings the kinds of an API group."""


def resource_of(manifest: Object) -> Resource:
    """The resource of an object that Podscale renders; kinds without a table entry get their regular plural."""
    kind = str(manifest["kind"])
    group, _, version = str(manifest["apiVersion"]).rpartition("/")
    known = next((found for found in JOB_KINDS.values() if (found.kind, found.group) == (kind, group)), None)
    if known is not None:
        return known
    lower = kind.lower()
    plural = f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}es" if lower.endswith("s") else f"{lower}s"
    return Resource(group, version, kind, plural)
