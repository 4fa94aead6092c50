"""How to reach the API server: the pod's own service account, or a kubeconfig with its contexts."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from podscale.errors import InputError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ClusterChoice(Protocol):
    """The part of the run document that says where: launch.cluster."""

    @property
    def namespace(self) -> str | None: ...
    @property
    def context(self) -> str | None: ...


@dataclass(frozen=True)
class Choice:
    """Where to work, for those who have no document."""

    namespace: str | None = None
    context: str | None = None


@dataclass(frozen=True)
class Target:
    """Which cluster is meant: where the credentials come from, and the namespace to work in."""

    origin: str
    """For messages: `context gke-prod of ~/.kube/config`, or `the service account of this pod`."""
    namespace: str
    context: str | None
    in_cluster: bool


def find_target(choice: ClusterChoice) -> Target:
    """The cluster that the document, KUBECONFIG, or the pod this runs in names.

    Raises InputError: no cluster is named anywhere, or the context does not exist.
    """
    if choice.context is None and "KUBECONFIG" not in os.environ and (SERVICE_ACCOUNT / "token").exists():
        own = (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        return Target("the service account of this pod", choice.namespace or own, None, in_cluster=True)
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException

    try:
        contexts, active = config.list_kube_config_contexts(config_file=_kubeconfig())
    except ConfigException as error:
        raise InputError(
            f"no Kubernetes cluster to talk to: {error}. Set KUBECONFIG, or make the file "
            "(GKE: `gcloud container clusters get-credentials CLUSTER`), or work here with launch.backend=local"
        ) from None
    except Exception as error:
        raise InputError(f"{_kubeconfig()}: not a usable kubeconfig: {error}") from None
    names = [str(entry["name"]) for entry in contexts]
    name = choice.context or (str(active["name"]) if active else "")
    found = next((entry for entry in contexts if entry["name"] == name), None)
    if found is None:
        raise InputError(
            f"{_kubeconfig()} has no context {name!r} (launch.cluster.context); it has: {', '.join(names) or 'none'}"
        )
    namespace = choice.namespace or str(found["context"].get("namespace") or "default")
    return Target(f"context {name} of {_kubeconfig()}", namespace, name, in_cluster=False)


def open_client(target: Target) -> Any:
    """A `kubernetes.client.ApiClient` with fresh credentials for `target`."""
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    configuration = client.Configuration()
    configuration.retries = False  # patience is ours: see podscale.launch.cluster.patience
    try:
        if target.in_cluster:
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(
                config_file=_kubeconfig(), context=target.context, client_configuration=configuration
            )
    except (ConfigException, OSError) as error:
        raise InputError(f"{target.origin}: the credentials cannot be used: {error}") from None
    return client.ApiClient(configuration)


def _kubeconfig() -> str:
    return os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
