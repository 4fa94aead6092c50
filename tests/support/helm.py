"""The chart rendered by the real Helm, for tests."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.util.libyaml import SafeLoader

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "podscale"
PROFILES = sorted((CHART / "ci").glob("*.yaml"))
KUBERNETES = "1.33.0"  # Helm built from its module alone reports Kubernetes 1.20

KUEUE = "kueue.x-k8s.io/v1beta2"
OPERATOR = "monitoring.coreos.com/v1"
GOOGLE = "monitoring.googleapis.com/v1"
EVERY_API = (KUEUE, OPERATOR, GOOGLE)

EVERYTHING: dict[str, Any] = {
    "rbac": {"pipelineRunner": {"serviceAccount": "pipeline-runner"}, "pipelinePods": True},
    "networkPolicy": {"ranks": "namespace"},
    "kueue": {"enabled": True, "flavors": [{"name": "cpu", "quotas": {"cpu": 8, "memory": "32Gi"}}]},
    "priorityClasses": [{"name": "urgent", "value": 1000, "description": "First.", "preempt": False}],
    "resourceQuota": {"requests.nvidia.com/gpu": 16},
    "limitRange": [{"type": "Container", "defaultRequest": {"cpu": "100m", "memory": "128Mi"}}],
    "pipeline": {"upload": True, "token": True, "userNamespace": "me"},
    "workspace": {"prepare": True},
    "directRun": {"enabled": True, "document": {"run": {"id": "digits"}, "data": {"shard_bytes": 1000000}}},
    "metrics": {"tls": {"secret": "metrics-tls", "clientSecret": "prometheus-tls"}, "tokenSecret": "metrics-token"},
    "images": {
        "pullSecrets": ["registry"],
        "registry": "registry.example/podscale",
        "prePull": {"enabled": True, "extra": ["registry.example/team/train:1"], "nodeSelector": {"pool": "gpu"}},
    },
}
"""Values with which the chart creates all its objects (except the bucket, which excludes the claim)."""


def cached_programs() -> Path:
    """Return the folder of the programs that `make cluster-up` builds."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podscale-cluster" / "bin"


def program() -> str:
    """Return Helm from the PATH or from the cluster's cache; skip the test if there is none."""
    helm = shutil.which("helm") or shutil.which("helm", path=str(cached_programs()))
    if helm is None:
        pytest.skip("helm is neither on the PATH nor in the cluster's cache; `make cluster-up` builds it")
    return helm


def run(*arguments: str | Path, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a helm command with these values, after any `-f` among the arguments."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(values or {}), file)
        file.flush()
        command = [program(), *map(str, arguments), "-f", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def template(
    profile: Path | None = None,
    values: Mapping[str, Any] | None = None,
    *,
    apis: Sequence[str] = EVERY_API,
    release: str = "podscale",
    namespace: str = "podscale",
) -> list[dict[str, Any]]:
    """Return the objects that an install would create, including hooks and tests."""
    base = profile.read_text(encoding="utf-8") if profile is not None else ""
    text = _rendered(release, namespace, tuple(apis), base, yaml.safe_dump(dict(values or {})))
    return [item for item in yaml.load_all(text, Loader=SafeLoader) if item]


@cache
def _rendered(release: str, namespace: str, apis: tuple[str, ...], profile: str, values: str) -> str:
    """Return the output of `helm template`; many tests look at the same objects."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(profile)
        file.flush()
        done = run(
            *("template", release, CHART, "--namespace", namespace, "--kube-version", KUBERNETES),
            *(f"--api-versions={api}" for api in apis),
            *("-f", file.name),
            values=yaml.safe_load(values),
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(values: Mapping[str, Any], *, apis: Sequence[str] = ()) -> str:
    """Return Helm's error message for these values."""
    done = run(
        *("template", "podscale", CHART, "--kube-version", KUBERNETES, *(f"--api-versions={api}" for api in apis)),
        values=values,
    )
    assert done.returncode != 0, f"accepted: {values}"
    return done.stderr


def kinds(objects: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [dict(item) for item in objects if item["kind"] == kind]


def pools_of_the_gke_page() -> dict[str, Any]:
    """Return the values that docs/how-to/gke.md shows for Spot machines and queued provisioning."""
    page = (ROOT / "docs" / "how-to" / "gke.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(kueue:\n.*?)```", page, re.DOTALL)
    values: dict[str, Any] = yaml.safe_load(block)
    return values


def monitor(objects: Sequence[Mapping[str, Any]], kind: str, name: str = "podscale") -> dict[str, Any]:
    """Return the PodMonitor or PodMonitoring of jobs' pods; `podscale-pipelines` is that of pipelines' tasks."""
    (monitor_object,) = [item for item in kinds(objects, kind) if item["metadata"]["name"] == name]
    return monitor_object


def pod_specs(objects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the specs of all pods that the objects start."""
    return [item["spec"] for item in kinds(objects, "Pod")] + [
        item["spec"]["template"]["spec"] for kind in ("Job", "DaemonSet") for item in kinds(objects, kind)
    ]


def defaults(objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the partial run document of podscale-defaults."""
    (configmap,) = [item for item in kinds(objects, "ConfigMap") if item["metadata"]["name"] == "podscale-defaults"]
    document: dict[str, Any] = yaml.safe_load(configmap["data"]["defaults.yaml"])
    return document
