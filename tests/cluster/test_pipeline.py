"""The complete compiled pipeline on a real cluster: the package's components as pods, training as a real PyTorchJob.

KFP's server is not included: tests.support.package_runner runs the package as KFP does. Everything in the pods is real:
images, commands, inputs, artifacts on a volume, Pod Security "restricted", the launcher's service account with the
chart's minimal role, and the training operator.
"""

import json

import pytest

from tests.cluster.pipeline import ONCE, Pipeline
from tests.support.package_runner import in_background

pytestmark = pytest.mark.timeout(900)


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
