"""Are objects what the operators' real CustomResourceDefinitions allow? The definitions come out of their Go modules.

What only an API server checks (CEL rules, webhooks) is not seen here.
"""

import copy
import functools
from typing import Any

import jsonschema
import pytest
import yaml

from tests.cluster.lab import programs
from tests.cluster.lab.errors import Unavailable

BASES = "config/components/crd/bases"
DEFINITIONS = {
    "PyTorchJob": ("training-operator", "manifests/base/crds/kubeflow.org_pytorchjobs.yaml"),
    "JAXJob": ("training-operator", "manifests/base/crds/kubeflow.org_jaxjobs.yaml"),
    "TrainJob": ("trainer", "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"),
    "TrainingRuntime": ("trainer", "manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml"),
    "JobSet": ("jobset", f"{BASES}/jobset.x-k8s.io_jobsets.yaml"),
    "ResourceFlavor": ("kueue", f"{BASES}/kueue.x-k8s.io_resourceflavors.yaml"),
    "ClusterQueue": ("kueue", f"{BASES}/kueue.x-k8s.io_clusterqueues.yaml"),
    "LocalQueue": ("kueue", f"{BASES}/kueue.x-k8s.io_localqueues.yaml"),
    "PodMonitor": ("prometheus-operator", "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"),
    "PrometheusRule": (
        "prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
}
"""The operator of each kind, in the version that the cluster under test has (tools/cluster/programs.yaml), and the
file in its module."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads a lone `=` as text: YAML 1.1 made a type of it, and operators list it among comparisons."""


_Loader.add_constructor("tag:yaml.org,2002:value", lambda _, node: node.value)


def validate(manifest: dict[str, Any]) -> None:
    """Fails where a field is unknown, missing or of a wrong type. Skips the test where the definition cannot be had."""
    assert manifest["apiVersion"] == _api_version(manifest["kind"])
    errors = [
        f"{error.json_path}: {error.message}"[:300] for error in _validator(manifest["kind"]).iter_errors(manifest)
    ]
    assert errors == []


def validate_status(kind: str, status: dict[str, Any]) -> None:
    """The same of the status of an object of this kind."""
    schema = _strict(copy.deepcopy(_stored(kind)["schema"]["openAPIV3Schema"]["properties"]["status"]))
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(status)


@functools.cache
def _definition(kind: str) -> Any:
    operator, path = DEFINITIONS[kind]
    try:
        text = (programs.module_files(operator) / path).read_bytes()
    except Unavailable as error:
        pytest.skip(f"the CustomResourceDefinition of {kind} is in a Go module: {error}")
    return yaml.load(text, Loader=_Loader)


def _stored(kind: str) -> Any:
    return next(version for version in _definition(kind)["spec"]["versions"] if version["storage"])


def _api_version(kind: str) -> str:
    return f"{_definition(kind)['spec']['group']}/{_stored(kind)['name']}"


@functools.cache
def _validator(kind: str) -> jsonschema.protocols.Validator:
    schema = _strict(copy.deepcopy(_stored(kind)["schema"]["openAPIV3Schema"]))
    schema["properties"]["metadata"] = {"type": "object", "required": ["name", "labels"]}  # Kubernetes' own
    return jsonschema.Draft202012Validator(schema)


def _strict(schema: Any) -> Any:
    """The schema with what an API server does to unknown fields under strict validation: it refuses them."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: _strict(value) for name, value in schema.items()}
    closed = "properties" in schema and isinstance(schema.get("type"), str) and schema["type"] == "object"
    if closed and "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
    if isinstance(schema.get("pattern"), str):
        strict["pattern"] = schema["pattern"].replace("^(?i)", "(?i)^")  # Go has flags anywhere, Python in front alone
    return strict
