"""Validation of objects against the operators' real CustomResourceDefinitions, taken from their Go modules.

CEL rules and webhooks, which only an API server evaluates, are not checked.
"""

import copy
import functools
from typing import Any

import jsonschema
import pytest
import yaml

from podscale.util.libyaml import SafeLoader
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
    "AdmissionCheck": ("kueue", f"{BASES}/kueue.x-k8s.io_admissionchecks.yaml"),
    "ProvisioningRequestConfig": ("kueue", f"{BASES}/kueue.x-k8s.io_provisioningrequestconfigs.yaml"),
    "Workload": ("kueue", f"{BASES}/kueue.x-k8s.io_workloads.yaml"),
    "LocalQueue": ("kueue", f"{BASES}/kueue.x-k8s.io_localqueues.yaml"),
    "InferenceService": ("kserve", "config/crd/full/serving.kserve.io_inferenceservices.yaml"),
    "PodMonitor": ("prometheus-operator", "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"),
    "PrometheusRule": (
        "prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
}
"""Operator module of each kind, in the test cluster's version (tools/cluster/programs.yaml), and the file in it."""


class _Loader(SafeLoader):
    """YAML loader that reads a lone `=` as text: it is a type in YAML 1.1, and operators list it among comparisons."""


_Loader.add_constructor("tag:yaml.org,2002:value", lambda _, node: node.value)


def validate(manifest: dict[str, Any]) -> None:
    """Fail if a field is unknown, missing or of a wrong type. Skip the test if the definition is unavailable."""
    assert manifest["apiVersion"] == _api_version(manifest["kind"])
    errors = [
        f"{error.json_path}: {error.message}"[:300] for error in _validator(manifest["kind"]).iter_errors(manifest)
    ]
    assert errors == []


def validate_status(kind: str, status: dict[str, Any]) -> None:
    """Validate the status of an object of this kind in the same way."""
    schema = _strict(copy.deepcopy(_stored(kind)["schema"]["openAPIV3Schema"]["properties"]["status"]))
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(status)


@functools.cache
def definition(kind: str) -> Any:
    operator, path = DEFINITIONS[kind]
    try:
        text = (programs.module_files(operator) / path).read_bytes()
    except Unavailable as error:
        pytest.skip(f"the CustomResourceDefinition of {kind} is in a Go module: {error}")
    return yaml.load(text, Loader=_Loader)


def _stored(kind: str) -> Any:
    return next(version for version in definition(kind)["spec"]["versions"] if version["storage"])


def _api_version(kind: str) -> str:
    return f"{definition(kind)['spec']['group']}/{_stored(kind)['name']}"


@functools.cache
def _validator(kind: str) -> jsonschema.protocols.Validator:
    schema = _strict(copy.deepcopy(_stored(kind)["schema"]["openAPIV3Schema"]))
    schema["properties"]["metadata"] = {"type": "object", "required": ["name", "labels"]}  # Kubernetes' own
    return jsonschema.Draft202012Validator(schema)


def _strict(schema: Any) -> Any:
    """Return the schema with unknown fields rejected, as an API server does under strict validation."""
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
        strict["pattern"] = schema["pattern"].replace("^(?i)", "(?i)^")  # Go allows flags anywhere, Python at the start
    return strict
