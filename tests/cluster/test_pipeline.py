"""The complete compiled pipeline on a real cluster: the package's components as pods, training as a real PyTorchJob.

KFP's server is not included: tests.support.package_runner runs the package as KFP does. Everything in the pods is real:
images, commands, inputs, artifacts on a volume, Pod Security "restricted", the launcher's service account with the
chart's minimal role, and the training operator.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from podscale.config import RunConfig
from podscale.kubernetes import cluster_doctor
from podscale.pipelines.package import package_pipeline
from tests.cluster import training
from tests.cluster.cluster import Cluster
from tests.cluster.pod_host import ClusterHost
from tests.support.package_runner import PackageRunner, in_background

pytestmark = pytest.mark.timeout(900)

LAUNCHER = "launcher"
ARTIFACTS = "artifacts"
Documents = Callable[..., RunConfig]
ONCE = ("launch.retries=0", "launch.cluster.restarts=0")


@pytest.fixture
def document(image: str, launcher_image: str) -> Documents:
    """Return the digits document for the pipeline, with at most one retry per task."""
    common = ("launch.backend=pytorchjob", "launch.hardware=cpu", "launch.retries=1")

    def make(run_id: str, *changes: str, epochs: int = 2) -> RunConfig:
        settings = (f"launch.launcher_image={launcher_image}", f"train.epochs={epochs}")
        return training.document(image, run_id, *common, *settings, *changes)

    return make


@pytest.fixture(scope="module")
def prepared_namespace(cluster: Cluster, namespace: str) -> str:
    """Yield a namespace with the launcher's service account, its role, and a claim for artifacts."""
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
    return namespace


class Pipeline:
    """One run of the compiled package in the namespace, and its files."""

    def __init__(
        self, cluster: Cluster, namespace: str, config: RunConfig, image: str, service_account: str = LAUNCHER
    ) -> None:
        self.cluster, self.namespace, self.image = cluster, namespace, image
        self.run_id = config.run.id
        host = ClusterHost(cluster.core, namespace)
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


@pytest.mark.cluster_ci
def test_the_whole_pipeline_trains_evaluates_and_reports(cluster, prepared_namespace, image, document):
    pipeline = Pipeline(cluster, prepared_namespace, document("whole", "launch.shard_pods=2", epochs=8), image)
    state = pipeline.runner.run()
    assert state == "SUCCEEDED", pipeline.logs()
    assert set(pipeline.states) == {"configure", "pack.0", "pack.1", "shard", "train", "evaluate", "report", "summary"}
    assert set(pipeline.states.values()) == {"SUCCEEDED"}
    job = pipeline.job()
    assert job is not None
    assert [c["type"] for c in job["status"]["conditions"] if c["status"] == "True"][-1] == "Succeeded"
    tasks = pipeline.runner.tasks
    assert tasks["shard"].outputs["shard_set"]["metadata"]["train_images"] > 1000
    assert tasks["evaluate"].outputs["metrics"]["metadata"]["top1"] > 0.8
    evaluation = json.loads(pipeline.file("evaluation.json"))
    assert evaluation["figures"]["top1"] == tasks["evaluate"].outputs["metrics"]["metadata"]["top1"]
    model = tasks["train"].outputs["model"]["uri"].removeprefix("minio://")
    assert "step" in tasks["train"].log, "the launcher must print the log of rank 0"
    assert model
    assert "<html" in pipeline.file("report.html")[:500].lower()
    assert "# Run whole: SUCCEEDED" in pipeline.file("summary.md")


def test_a_launcher_that_is_killed_adopts_its_job(cluster, prepared_namespace, image, document):
    pipeline = Pipeline(cluster, prepared_namespace, document("adopted", epochs=12), image)
    thread = in_background(pipeline.runner.run)
    pipeline.runner.wait_for("train")
    pipeline.wait_for_steps(5)
    job = pipeline.job()
    assert job is not None
    cluster.kill(prepared_namespace, pipeline.runner.tasks["train"].pods[-1])
    thread.join(600)
    train = pipeline.runner.tasks["train"]
    assert train.state == "SUCCEEDED", pipeline.logs()
    assert len(train.pods) == 2
    after = pipeline.job()
    assert after is not None
    assert after["metadata"]["uid"] == job["metadata"]["uid"], "the second attempt created another job"
    restarts = [
        pod.status.container_statuses[0].restart_count
        for pod in cluster.pods(prepared_namespace, "training.kubeflow.org/job-name=adopted")
    ]
    assert restarts == [0, 0]
    assert "PyTorchJob adopted" in train.log
    assert set(pipeline.states.values()) == {"SUCCEEDED"}


def test_the_error_of_a_failing_training_reaches_the_summary(cluster, prepared_namespace, image, document):
    config = document("failing", "train.schedule.learning_rate=1e30", "train.max_nonfinite=1", *ONCE)
    pipeline = Pipeline(cluster, prepared_namespace, config, image)
    assert pipeline.runner.run() == "FAILED"
    assert pipeline.states["train"] == "FAILED", pipeline.logs()
    assert pipeline.states["evaluate"] == "SKIPPED"
    assert pipeline.states["summary"] == "SUCCEEDED"
    summary = pipeline.file("summary.md")
    assert "# Run failing: FAILED" in summary
    outcome = json.loads(pipeline.file("outcome.json"))["train"]
    assert outcome["exit_code"] != 0
    assert outcome["error"]
    assert outcome["error"] in summary


@pytest.mark.parametrize("how", ["cancelled", "orphaned"])
def test_a_run_that_ends_without_its_job_stops_it(cluster, prepared_namespace, image, document, how):
    """Cancelled by a user, or failed because its launcher was killed and has no retry left."""
    pipeline = Pipeline(cluster, prepared_namespace, document(how, *ONCE, epochs=500), image)
    thread = in_background(pipeline.runner.run)
    train = pipeline.runner.wait_for("train")
    pipeline.wait_for_steps(5)
    assert len(pipeline.training_pods()) == 2
    if how == "cancelled":
        pipeline.runner.terminate()
    else:
        cluster.kill(prepared_namespace, train.pods[-1])
    thread.join(300)
    state = "RUNNING" if how == "cancelled" else "FAILED"
    assert pipeline.states["train"] == state
    assert pipeline.states["summary"] == "SUCCEEDED", pipeline.logs()
    cluster.wait("the end of the job", lambda: pipeline.job() is None)
    cluster.wait("the end of its pods", lambda: not pipeline.training_pods())
    summary = pipeline.file("summary.md")
    assert f"# Run {how}: {state}" in summary
    assert f"PyTorchJob {how} was stopped" in summary
    assert json.loads(pipeline.file("outcome.json"))["train"]["exit_code"] == 75, "the job must save before it exits"


def test_a_job_that_cannot_be_submitted_leaves_its_error(cluster, prepared_namespace, image, document):
    config = document("refused", *ONCE)
    pipeline = Pipeline(cluster, prepared_namespace, config, image, service_account="default")
    assert pipeline.runner.run() == "FAILED"
    assert pipeline.runner.tasks["train"].state == "FAILED"
    assert "Traceback" not in pipeline.runner.tasks["train"].log
    error = json.loads(pipeline.file("outcome.json"))["train"]["error"]
    assert f"system:serviceaccount:{prepared_namespace}:default" in error
    assert pipeline.states["summary"] == "SUCCEEDED"
    assert error in pipeline.file("summary.md")
