"""Credentials for the API server: the pod's service account, or a context of a kubeconfig."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from podscale.errors import InputError
from podscale.version import VERSION

SERVICE_ACCOUNT_PATH = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ClusterSelector(Protocol):
    """Namespace and context, as launch.cluster of the run document has them."""

    @property
    def namespace(self) -> str | None: ...
    @property
    def context(self) -> str | None: ...


@dataclass(frozen=True)
class NamedCluster:
    """Namespace and context of a command that has no run document."""

    namespace: str | None = None
    context: str | None = None


@dataclass(frozen=True)
class ClusterTarget:
    """A cluster: the source of its credentials, and the namespace of the jobs."""

    origin: str
    """For messages: `context gke-prod of ~/.kube/config`, or `the service account of this pod`."""
    namespace: str
    context: str | None
    is_in_cluster: bool


def find_cluster_target(choice: ClusterSelector) -> ClusterTarget:
    """Return the cluster that the document, KUBECONFIG or the pod of this process names.

    Raises InputError if none of them names one, or if the context does not exist.
    """
    if choice.context is None and "KUBECONFIG" not in os.environ and (SERVICE_ACCOUNT_PATH / "token").exists():
        own = (SERVICE_ACCOUNT_PATH / "namespace").read_text(encoding="utf-8").strip()
        return ClusterTarget("the service account of this pod", choice.namespace or own, None, is_in_cluster=True)
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException

    try:
        contexts, active = config.list_kube_config_contexts(config_file=_load_kubeconfig())
    except ConfigException as error:
        raise InputError(
            f"no Kubernetes cluster to talk to: {error}",
            hint="Set KUBECONFIG, or make the file (GKE: `gcloud container clusters get-credentials CLUSTER`), or work "
            "here with launch.backend=local",
        ) from None
    except Exception as error:
        raise InputError(f"not a usable kubeconfig: {error}", field=_load_kubeconfig()) from None
    names = [str(entry["name"]) for entry in contexts]
    name = choice.context or (str(active["name"]) if active else "")
    found = next((entry for entry in contexts if entry["name"] == name), None)
    if found is None:
        raise InputError(
            f"{_load_kubeconfig()} has no such context",
            field="launch.cluster.context",
            got=name,
            hint=f"Choose one of {', '.join(names)}" if names else "It has none: log in to a cluster first",
        )
    namespace = choice.namespace or str(found["context"].get("namespace") or "default")
    return ClusterTarget(f"context {name} of {_load_kubeconfig()}", namespace, name, is_in_cluster=False)


def open_client(target: ClusterTarget) -> Any:
    """Return a `kubernetes.dynamic.DynamicClient` with fresh credentials; no request is sent (see transport)."""
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException
    from kubernetes.dynamic import DynamicClient

    configuration = client.Configuration()
    configuration.retries = False  # the retries are RetryPolicy's
    try:
        if target.is_in_cluster:
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(
                config_file=_load_kubeconfig(), context=target.context, client_configuration=configuration
            )
    except (ConfigException, OSError) as error:
        raise InputError(f"the credentials cannot be used: {error}", field=target.origin) from None
    api_client = client.ApiClient(configuration)
    api_client.user_agent = f"podscale/{VERSION}"
    return DynamicClient(api_client, discoverer=lambda *_: None)


def _load_kubeconfig() -> str:
    return os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
