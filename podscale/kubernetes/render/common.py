"""Parts common to all kinds of job: metadata, network policy of the pods, and YAML for `kubectl apply -f -`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from podscale.errors import InputError
from podscale.kubernetes.job_spec import METRICS_PORT, JobSpec
from podscale.kubernetes.render import pod_placement
from podscale.kubernetes.resources import JOB_KINDS

MONITORING_NAMESPACES = ("monitoring", "gmp-system", "gke-gmp-system")
"""Where a Prometheus may scrape from: its operator's usual place, Google's managed one, and that of GKE Autopilot.

The chart's networkPolicy.monitoringNamespaces, which has the same default, admits others; policies add up.
"""
Manifest = dict[str, Any]
"""An object of Kubernetes: JSON values, keys in the order in which people read them."""


@dataclass(frozen=True)
class JobManifests:
    """The job, and what it needs beside it.

    owned_objects: objects that belong to the job and end with it (network policy, runtime); create them before the job
    and make it their owner once it is there.
    """

    job: Manifest
    owned_objects: tuple[Manifest, ...] = ()

    @property
    def all_objects(self) -> tuple[Manifest, ...]:
        """Return every object, in the order of creation."""
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
    """Return name and labels of an object that belongs to a job."""
    named: Manifest = {"name": spec.name}
    if spec.cluster.namespace is not None:
        named["namespace"] = spec.cluster.namespace
    named["labels"] = dict(labels)
    return {**named, "annotations": dict(annotations)} if annotations else named


def network_policy(spec: JobSpec) -> Manifest:
    """Only the pods of the job reach each other, and only a Prometheus their metrics.

    It is known by its namespace: labels of pods are given by whoever creates them.
    """

    def pods() -> Manifest:
        return {"podSelector": {"matchLabels": spec.selector}}

    named = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": [*MONITORING_NAMESPACES]}
    prometheus = [{"namespaceSelector": {"matchExpressions": [named]}}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": object_metadata(spec, spec.labels),
        "spec": {
            **pods(),
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [pods()]},
                {"from": prometheus, "ports": [{"port": METRICS_PORT, "protocol": "TCP"}]},
            ],
        },
    }


def ttl_after_finished(spec: JobSpec) -> dict[str, int]:
    """Return the field with the time that a finished job stays."""
    keep = spec.cluster.keep_hours
    return {} if keep is None else {"ttlSecondsAfterFinished": round(keep * 3600)}


def check_not_elastic(spec: JobSpec, backend: str) -> None:
    """Raise InputError if the job shall go on with fewer pods, which only a PyTorchJob can."""
    if spec.min_nodes is not None:
        raise InputError(
            f"a {JOB_KINDS[backend].kind} cannot lose pods and go on",
            field="launch.cluster.min_nodes",
            got=spec.min_nodes,
            hint="Leave it out (a loss then restarts all from the newest checkpoint), or set launch.backend=pytorchjob",
        )


class _Dumper(yaml.SafeDumper):
    """Long texts as blocks, so that the run document in a job can be read; nothing is written as a reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def to_yaml(objects: Iterable[Any]) -> str:
    """Return one YAML document for each object."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, explicit_start=True)
