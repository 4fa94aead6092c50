"""Training jobs whose pipeline ends, in each way, on a real cluster with real operators and garbage collection.

The pipeline's run is a Workflow object that nothing executes: it only owns the pods, as Argo's own does. An outage of
the API server is not made here, because other tests use it (tests/system/pipelines/test_launcher_lost.py has it).
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from podscale.kubernetes.client import connect_cluster
from podscale.kubernetes.job_spec import build_job_spec
from podscale.kubernetes.jobs import list_jobs
from podscale.kubernetes.render import render_job
from podscale.kubernetes.transport import NamedCluster
from tests.cluster.cluster import Cluster
from tests.cluster.pipeline import LAUNCHER, ONCE, Pipeline, prepare_for_pipelines
from tests.cluster.training import FINGERPRINT, Result, Training
from tests.support.package_runner import in_background

pytestmark = pytest.mark.timeout(1200)

EPOCHS = 30
SOON = "launch.cluster.launcher_grace_minutes=0.1"
WORKFLOW_KIND = {"group": "argoproj.io", "version": "v1alpha1", "kind": "Workflow", "plural": "workflows"}
KILL_LAUNCHER = """
import os, pathlib
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if b"podscale.stages." b"launcher_process" in (process / "cmdline").read_bytes():
        os.kill(int(process.name), 9)
"""


@pytest.fixture(scope="module")
def reference(cluster: Cluster, prepared_namespace: str, image: str) -> Result:
    """Result of an undisturbed training, and the shard set."""
    settings = (f"train.epochs={EPOCHS}",)
    Training(cluster, prepared_namespace, image, "reference", "job", *settings, stage="shard").succeed()
    training = Training(cluster, prepared_namespace, image, "reference", "pytorchjob", *settings)
    training.succeed()
    return training.result()


@pytest.fixture
def workflow(cluster: Cluster, prepared_namespace: str) -> Iterator[dict[str, Any]]:
    """Owner reference to a Workflow; its definition is created unless Argo is installed."""
    api_version = f"{WORKFLOW_KIND['group']}/{WORKFLOW_KIND['version']}"
    name = f"{WORKFLOW_KIND['plural']}.{WORKFLOW_KIND['group']}"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
        "spec": {
            "group": WORKFLOW_KIND["group"],
            "scope": "Namespaced",
            "names": {"kind": WORKFLOW_KIND["kind"], "plural": WORKFLOW_KIND["plural"]},
            "versions": [{"name": WORKFLOW_KIND["version"], "served": True, "storage": True, "schema": schema}],
        },
    }
    is_new = WORKFLOW_KIND["group"] not in cluster.groups
    if is_new:
        cluster.create("", definition)

    def create() -> Any:
        try:
            manifest = {"apiVersion": api_version, "kind": "Workflow", "metadata": {"name": "run-1"}}
            return cluster.create(prepared_namespace, manifest)
        except Exception:  # until the definition is served
            cluster.dynamic.resources.invalidate_cache()
            return None

    made = cluster.wait("the Workflow", create).to_dict()
    owner = {"apiVersion": api_version, "kind": "Workflow", "name": "run-1", "uid": made["metadata"]["uid"]}
    yield {**owner, "controller": True}
    if is_new:
        cluster.delete("", "apiextensions.k8s.io/v1", "CustomResourceDefinition", name)


def outcome(pipeline: Pipeline) -> dict[str, Any]:
    train: dict[str, Any] = json.loads(pipeline.file("outcome.json"))["train"]
    return train


def result(pipeline: Pipeline) -> Result:
    command = ("python3", "-c", FINGERPRINT, pipeline.run_id)
    return Result(**json.loads(pipeline.cluster.run(pipeline.namespace, pipeline.image, *command)))


def has_ended(pipeline: Pipeline) -> bool:
    """Return True if the job's pods have ended, so that they hold no resources."""
    pods = pipeline.cluster.pods(pipeline.namespace, f"training.kubeflow.org/job-name={pipeline.run_id}")
    return bool(pods) and all(pod.status.phase in ("Succeeded", "Failed") for pod in pods)


def test_a_terminated_run_has_its_job_stopped_by_the_exit_handler(cluster, prepared_namespace, image, document):
    pipeline = Pipeline(cluster, prepared_namespace, document("cancelled", *ONCE, epochs=500), image)
    thread = in_background(pipeline.runner.run)
    pipeline.runner.wait_for("train")
    pipeline.wait_for_steps(5)
    assert len(pipeline.training_pods()) == 2
    pipeline.runner.terminate()
    thread.join(300)
    assert pipeline.states["train"] == "RUNNING"
    assert pipeline.states["summary"] == "SUCCEEDED", pipeline.logs()
    cluster.wait("the end of the job", lambda: pipeline.job() is None)
    cluster.wait("the end of its pods", lambda: not pipeline.training_pods())
    assert "PyTorchJob cancelled" in pipeline.file("summary.md")
    assert outcome(pipeline)["exit_code"] == 75, "the job must save before it exits"


def test_a_terminated_run_without_its_exit_handler_ends_its_job_after_the_grace_time(
    cluster, prepared_namespace, image, document, reference
):
    """As with KFP 2.17's default retry strategy. The next run of the pipeline resumes to the same bits."""
    config = document("terminated", SOON, epochs=EPOCHS)
    pipeline = Pipeline(cluster, prepared_namespace, config, image)
    thread = in_background(pipeline.runner.run)
    pipeline.runner.wait_for("train")
    pipeline.wait_for_steps(5)
    pipeline.runner.terminate(exit_task=False)
    thread.join(300)
    assert pipeline.states["summary"] == "SKIPPED"
    cluster.wait("the end of the pods", lambda: has_ended(pipeline))
    assert outcome(pipeline)["exit_code"] == 75
    (entry,) = list_jobs(connect_cluster(NamedCluster(prepared_namespace)), "terminated", "train")
    assert entry.state.phase == "failed"
    assert entry.state.stage_exit is not None
    assert entry.state.stage_exit.exit_code == 75
    again = Pipeline(cluster, prepared_namespace, config, image)
    assert again.runner.run() == "SUCCEEDED", again.logs()
    assert result(again).same_bits(reference)


def test_the_healthy_job_of_a_killed_launcher_is_left_to_a_retry(cluster, prepared_namespace, image, document):
    pipeline = Pipeline(cluster, prepared_namespace, document("orphaned", *ONCE, epochs=EPOCHS), image)
    thread = in_background(pipeline.runner.run)
    train = pipeline.runner.wait_for("train")
    pipeline.wait_for_steps(5)
    job = pipeline.job()
    assert job is not None
    cluster.kill(prepared_namespace, train.pods[-1])
    thread.join(300)
    assert pipeline.states["train"] == "FAILED"
    assert pipeline.states["summary"] == "SUCCEEDED", pipeline.logs()
    assert "podscale stop orphaned" in pipeline.file("summary.md")
    again = Pipeline(cluster, prepared_namespace, document("orphaned", *ONCE, epochs=EPOCHS), image)
    assert again.runner.run() == "SUCCEEDED", again.logs()
    after = again.job()
    assert after is not None
    assert after["metadata"]["uid"] == job["metadata"]["uid"], "the retry adopts the job"


def test_a_launcher_process_that_is_killed_is_replaced_in_its_pod(cluster, prepared_namespace, image, document):
    pipeline = Pipeline(cluster, prepared_namespace, document("killed", *ONCE, epochs=EPOCHS), image)
    thread = in_background(pipeline.runner.run)
    train = pipeline.runner.wait_for("train")
    pipeline.wait_for_steps(5)
    job = pipeline.job()
    assert job is not None
    cluster.execute(prepared_namespace, train.pods[-1], "python3", "-c", KILL_LAUNCHER)
    thread.join(600)
    assert set(pipeline.states.values()) == {"SUCCEEDED"}, pipeline.logs()
    assert len(train.pods) == 1
    assert "SIGKILL" in train.log
    after = pipeline.job()
    assert after is not None
    assert after["metadata"]["uid"] == job["metadata"]["uid"]


def test_a_job_that_is_deleted_by_hand_is_submitted_again(cluster, prepared_namespace, image, document, reference):
    config = document("vanished", epochs=EPOCHS)
    pipeline = Pipeline(cluster, prepared_namespace, config, image)
    thread = in_background(pipeline.runner.run)
    train = pipeline.runner.wait_for("train")
    pipeline.wait_for_steps(5)
    cluster.delete(prepared_namespace, "kubeflow.org/v1", "PyTorchJob", "vanished")
    thread.join(900)
    assert set(pipeline.states.values()) == {"SUCCEEDED"}, pipeline.logs()
    assert len(train.pods) == 1, "the launcher itself retries, because KFP may not"
    assert result(pipeline).same_bits(reference)


def test_the_deletion_of_the_pipelines_run_deletes_its_job(cluster, prepared_namespace, image, document, workflow):
    pipeline = Pipeline(
        cluster, prepared_namespace, document("deleted", *ONCE, epochs=500), image, LAUNCHER, owner=workflow
    )
    thread = in_background(pipeline.runner.run)
    pipeline.runner.wait_for("train")
    pipeline.wait_for_steps(5)
    job = pipeline.job()
    assert job is not None
    assert [owner["kind"] for owner in job["metadata"]["ownerReferences"]] == ["Workflow"]
    pipeline.runner.terminate(exit_task=False)
    cluster.delete(prepared_namespace, workflow["apiVersion"], "Workflow", workflow["name"])
    cluster.wait("the end of the job", lambda: pipeline.job() is None)
    cluster.wait("the end of its pods", lambda: not pipeline.training_pods())
    thread.join(300)
    train = outcome(pipeline)
    # The launcher's pod and the job are deleted at once, so the launcher may see first that its job is gone.
    assert train["exit_code"] == 75 or "was deleted" in train["error"], train


def test_the_deletion_of_the_namespace_ends_launcher_and_job(cluster, image, document):
    with cluster.namespace("pipeline-namespace") as name:
        prepare_for_pipelines(cluster, name)
        pipeline = Pipeline(cluster, name, document("namespace", *ONCE, epochs=500), image)
        thread = in_background(lambda: _ignore_refusals(pipeline))
        pipeline.runner.wait_for("train")
        pipeline.wait_for_steps(5)
    cluster.wait("the end of the namespace", lambda: name not in _namespaces(cluster))
    thread.join(300)
    assert not thread.is_alive()


def _ignore_refusals(pipeline: Pipeline) -> None:
    try:
        pipeline.runner.run()
    except ApiException:  # of the exit task, in a namespace that is being deleted
        return


def _namespaces(cluster: Cluster) -> list[str]:
    return [item.metadata.name for item in cluster.core.list_namespace().items]


@pytest.mark.parametrize(
    "backend",
    [
        "pytorchjob",
        pytest.param("jaxjob", marks=pytest.mark.cluster_full("kubeflow.org")),
        pytest.param("jobset", marks=pytest.mark.cluster_full("jobset.x-k8s.io")),
        pytest.param("trainjob", marks=pytest.mark.cluster_full("trainer.kubeflow.org")),
    ],
)
def test_pods_of_an_abandoned_job_of_each_kind_end(cluster, prepared_namespace, image, document, reference, backend):
    """No launcher ever renews a heartbeat, which is the same as one that is lost."""
    config = document(f"abandoned-{backend}", SOON, f"launch.backend={backend}", epochs=500)
    spec = build_job_spec(config, "train", pipeline=True)
    manifests = render_job(spec, backend)
    for manifest in (*manifests.owned_objects, manifests.job):
        cluster.create(prepared_namespace, manifest)
    api = connect_cluster(NamedCluster(prepared_namespace))

    def ended() -> bool:
        (entry,) = list_jobs(api, spec.run, "train")
        return entry.state.is_finished

    cluster.wait("the end of the job", ended)
    (entry,) = list_jobs(api, spec.run, "train")
    assert entry.state.phase == "failed"
    assert entry.state.stage_exit is not None
    assert entry.state.stage_exit.exit_code == 75
    selector = ",".join(f"{key}={value}" for key, value in spec.selector.items())
    cluster.wait(
        "the end of the pods",
        lambda: all(pod.status.phase in ("Succeeded", "Failed") for pod in cluster.pods(prepared_namespace, selector)),
    )
    command = ("cat", f"/workspace/runs/{spec.run}/outcome.json")
    train = json.loads(cluster.run(prepared_namespace, image, *command))["train"]
    assert train["exit_code"] == 75
    assert "launcher_grace_minutes" in train["error"]
