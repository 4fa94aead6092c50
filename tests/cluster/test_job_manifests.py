"""Every file of manifests/jobs/ on a real API server: strict schema, the operators' CEL rules and webhooks.

docs/reference/hardware.md relies on this. Only TrainingRuntimes are created, because a TrainJob needs its runtime.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tools.job_manifests import TARGET as JOBS

pytestmark = [pytest.mark.cluster_ci, pytest.mark.timeout(120)]
FILES = sorted(JOBS.rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(JOBS)))
def test_the_api_server_accepts_it(cluster: Cluster, namespace: str, file: Path) -> None:
    objects = [item for item in yaml.safe_load_all(file.read_text(encoding="utf-8")) if item]
    absent = sorted({item["kind"] for item in objects if not serves(cluster, item)})
    if absent:
        pytest.skip(f"this cluster lacks the API of {', '.join(absent)}: make cluster-up FULL=1")
    runtimes = [item for item in objects if item["kind"] == "TrainingRuntime"]
    rest = [item for item in objects if item not in runtimes]
    create(namespace, runtimes)
    try:
        create(namespace, rest, "--dry-run=server")
    finally:
        for runtime in runtimes:
            cluster.delete(namespace, runtime["apiVersion"], runtime["kind"], runtime["metadata"]["name"])


def test_a_field_that_the_operator_does_not_know_is_refused(cluster: Cluster, namespace: str) -> None:
    (job,) = [
        item
        for item in yaml.safe_load_all((JOBS / "digits.pytorchjob.yaml").read_text(encoding="utf-8"))
        if item["kind"] == "PyTorchJob"
    ]
    if not serves(cluster, job):
        pytest.skip("this cluster lacks the API of PyTorchJob")
    job["spec"]["runPolicy"]["cleanPods"] = "All"
    with pytest.raises(AssertionError, match="cleanPods"):
        create(namespace, [job], "--dry-run=server")


def serves(cluster: Cluster, manifest: dict[str, Any]) -> bool:
    return bool(cluster.dynamic.resources.search(api_version=manifest["apiVersion"], kind=manifest["kind"]))


def create(namespace: str, objects: list[dict[str, Any]], *options: str) -> None:
    """Create the objects. Fails if the API server or a webhook rejects one, or warns that it would reject its pods."""
    if not objects:
        return
    command = ["kubectl", "create", "--namespace", namespace, "--validate=strict", *options, "-f", "-"]
    done = subprocess.run(command, input=yaml.safe_dump_all(objects), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "would violate PodSecurity" not in done.stderr, done.stderr
