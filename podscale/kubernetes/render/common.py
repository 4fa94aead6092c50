"""Parts common to all kinds of job: metadata, network policy of the pods, and YAML for `kubectl apply -f -`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from podscale.errors import InputError
from podscale.kubernetes.job_spec import METRICS_PORT, JobSpec
from podscale.kubernetes.render import pod_placement
from podscale.kubernetes.resources import JOB_KINDS
from podscale.util.libyaml import SafeDumper

MONITORING_NAMESPACES = ("monitoring", "gmp-system", "gke-gmp-system")
"""Namespaces of Prometheus: its operator's, that of Google's managed one, and that of GKE Autopilot.

The chart's networkPolicy.monitoringNamespaces has the same default and can admit others, because policies are additive.
"""
Manifest = dict[str, Any]
"""Kubernetes object as JSON values, with keys in the usual order."""


@dataclass(frozen=True)
class JobManifests:
    """A job and its owned objects (network policy, runtime), which are created before it and deleted with it."""

    job: Manifest
    owned_objects: tuple[Manifest, ...] = ()

    @property
    def all_objects(self) -> tuple[Manifest, ...]:
        """All objects, in the order of creation."""
        return (*self.owned_objects, self.job)


def job_object(
    spec: JobSpec, backend: str, body: Mapping[str, Any], annotations: Mapping[str, str] | None = None
) -> Manifest:
    """Return the object of a job with `body` as its spec."""
    kind = JOB_KINDS[backend]
    labels = {**spec.labels, **pod_placement.queue_labels(spec)}
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": object_metadata(spec, labels, {**spec.annotations, **(annotations or {})}),
        "spec": dict(body),
    }


def object_metadata(spec: JobSpec, labels: Mapping[str, str], annotations: Mapping[str, str] | None = None) -> Manifest:
    return {
        "name": spec.name,
        **({"namespace": spec.cluster.namespace} if spec.cluster.namespace is not None else {}),
        "labels": dict(labels),
        **({"annotations": dict(annotations)} if annotations else {}),
    }


def network_policy(spec: JobSpec, clients: Manifest | None = None) -> Manifest:
    """Return the network policy: the pods accept connections from clients and, for metrics, from Prometheus.

    Prometheus is identified by its namespace, because any user can set labels of pods.

    Args:
        clients: Rule of the clients; None: the pods of the job, on all ports.
    """

    def pods() -> Manifest:
        return {"podSelector": {"matchLabels": spec.selector}}

    is_monitoring = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": [*MONITORING_NAMESPACES]}
    prometheus = [{"namespaceSelector": {"matchExpressions": [is_monitoring]}}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": object_metadata(spec, spec.labels),
        "spec": {
            **pods(),
            "policyTypes": ["Ingress"],
            "ingress": [
                clients or {"from": [pods()]},
                {"from": prometheus, "ports": [{"port": METRICS_PORT, "protocol": "TCP"}]},
            ],
        },
    }


def ttl_after_finished(spec: JobSpec) -> dict[str, int]:
    """Return the field with the time after which a finished job is deleted."""
    hours = spec.cluster.keep_hours
    return {} if hours is None else {"ttlSecondsAfterFinished": round(hours * 3600)}


def check_not_elastic(spec: JobSpec, backend: str) -> None:
    """Raise InputError for an elastic job, which only a PyTorchJob supports."""
    if spec.min_nodes is not None:
        raise InputError(
            f"a {JOB_KINDS[backend].kind} cannot continue with fewer pods",
            field="launch.cluster.min_nodes",
            got=spec.min_nodes,
            hint="Remove it (after a loss, all pods then restart from the newest checkpoint), or set "
            "launch.backend=pytorchjob",
        )


class _Dumper(SafeDumper):
    """YAML dumper without anchors that writes texts of several lines as blocks, so that run documents are readable."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def to_yaml(objects: Iterable[Any]) -> str:
    """Return one YAML document for each object."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, explicit_start=True)
