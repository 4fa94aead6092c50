"""Compiled pipelines on the cluster under test: their documents, what their namespace needs, and one run."""

from collections.abc import Callable
from typing import Any

from kubernetes.client.exceptions import ApiException

from podscale.config import RunConfig
from podscale.kubernetes import cluster_doctor
from podscale.pipelines.package import package_pipeline
from tests.cluster import training
from tests.cluster.cluster import Cluster
from tests.cluster.pod_host import ClusterHost
from tests.support.package_runner import PackageRunner

LAUNCHER = "launcher"
ARTIFACTS = "artifacts"
Documents = Callable[..., RunConfig]
ONCE = ("launch.retries=0", "launch.cluster.restarts=0")


def pipeline_document(image: str, launcher_image: str, run_id: str, *changes: str, epochs: int = 2) -> RunConfig:
    """Return the digits document for the pipeline, with at most one retry per task."""
    common = ("launch.backend=pytorchjob", "launch.hardware=cpu", "launch.retries=1")
    settings = (f"launch.launcher_image={launcher_image}", f"train.epochs={epochs}")
    return training.document(image, run_id, *common, *settings, *changes)


def prepare_for_pipelines(cluster: Cluster, namespace: str) -> None:
    """Create the launcher's service account, its role, and a claim for artifacts."""
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    name = {"metadata": {"name": LAUNCHER}}
    cluster.core.create_namespaced_service_account(namespace, name)
    rules = [
        {"apiGroups": [rule.group], "resources": [rule.resource], "verbs": list(rule.verbs)}
        for rule in cluster_doctor.PERMISSION_RULES
    ]
    cluster.create(namespace, {**kind, "kind": "Role", **name, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": LAUNCHER, "namespace": namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": LAUNCHER}
    cluster.create(namespace, {**kind, "kind": "RoleBinding", **name, "subjects": [subject], "roleRef": reference})
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.core.create_namespaced_persistent_volume_claim(namespace, {"metadata": {"name": ARTIFACTS}, "spec": claim})


class Pipeline:
    """One run of the compiled package in the namespace, and its files.

    Args:
        owner: Owner reference of the tasks' pods, in the place of KFP's Workflow.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        config: RunConfig,
        image: str,
        service_account: str = LAUNCHER,
        owner: dict[str, Any] | None = None,
    ) -> None:
        self.cluster, self.namespace, self.image = cluster, namespace, image
        self.run_id = config.run.id
        host = ClusterHost(cluster.core, namespace, owner)
        self.runner = PackageRunner(
            package_pipeline(config), host, artifacts_claim=ARTIFACTS, service_account=service_account
        )

    @property
    def states(self) -> dict[str, str]:
        return {name: task.state for name, task in self.runner.tasks.items()}

    def logs(self) -> str:
        return "\n".join(f"== {name}: {task.state}\n{task.log[-3000:]}" for name, task in self.runner.tasks.items())

    def file(self, name: str) -> str:
        """Return a file of the run directory."""
        return self.cluster.run(self.namespace, self.image, "cat", f"/workspace/runs/{self.run_id}/{name}")

    def job(self) -> dict[str, Any] | None:
        try:
            return self.cluster.get(self.namespace, "kubeflow.org/v1", "PyTorchJob", self.run_id)
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def training_pods(self) -> list[str]:
        selector = f"training.kubeflow.org/job-name={self.run_id}"
        return [str(pod.metadata.name) for pod in self.cluster.pods(self.namespace, selector)]

    def wait_for_steps(self, number: int) -> None:
        """Wait until the job has logged that many steps."""
        path = f"/workspace/runs/{self.run_id}/metrics.jsonl"
        counted = f'grep -cs \'"kind": *"step"\' {path}'
        script = f'until [ "$({counted})" -ge {number} ] 2>/dev/null; do sleep 0.5; done'
        self.cluster.run(self.namespace, self.image, "sh", "-c", script)
