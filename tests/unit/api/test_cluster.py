"""Runs on a cluster by the Python API, against the cluster double."""

import json
import threading
from pathlib import Path

import pytest

import podscale
from podscale.api import cluster_jobs
from podscale.kubernetes import logs, run_stage
from tests.support.cluster_objects import condition, job, pod, terminated
from tests.support.fake_cluster import FakeCluster
from tests.support.refusals import refused

RECORDS = (
    {"time": 1.0, "kind": "event", "event": "start", "step": 0, "total_steps": 2},
    {"time": 2.0, "kind": "step", "step": 1, "epoch": 0.5, "loss": 2.0, "learning_rate": 0.1, "images_per_second": 9.0},
)
OPTIONS = {
    "run": {"id": "r1", "workspace": "/work"},
    "launch": {"nodes": 2, "cluster": {"workspace_claim": "w"}},
}


@pytest.fixture(autouse=True)
def _claim(cluster: FakeCluster) -> None:
    cluster.put("persistentvolumeclaims", {"metadata": {"name": "w"}, "spec": {"accessModes": ["ReadWriteMany"]}})


@pytest.fixture
def training(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Job of two pods that has logged one step."""
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(cluster_jobs, "STATE_CHECK_SECONDS", 0.05)
    cluster.put("pytorchjobs", job())
    for index in (0, 1):
        cluster.put("pods", pod(index))
    for record in RECORDS:
        cluster.say("r1-worker-0", json.dumps(record))
    return cluster


def test_submit_creates_the_first_job_and_prints_nothing(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = podscale.submit("digits", stage="train", **OPTIONS)
    assert (run.id, run.namespace) == ("r1", "train")
    assert [made["metadata"]["name"] for made in cluster.all("pytorchjobs")] == ["r1"]
    (status,) = run.status()
    assert (status.stage, status.kind, status.phase) == ("train", "PyTorchJob", "pending")
    podscale.submit("digits", stage="train", **OPTIONS)
    assert len(cluster.all("pytorchjobs")) == 1, "the second call adopts the job"
    assert capsys.readouterr() == ("", "")


def test_a_document_that_was_loaded_takes_the_defaults_of_the_cluster(cluster: FakeCluster) -> None:
    defaults = "run: {workspace: /work}\nlaunch: {image: cluster/image:1, cluster: {workspace_claim: w}}\n"
    cluster.put("configmaps", {"metadata": {"name": "podscale-defaults"}, "data": {"defaults.yaml": defaults}})
    config = podscale.load("digits", run={"id": "r1"}, launch={"nodes": 2})
    run = podscale.submit(config, stage="train")
    assert run.config is not None
    assert run.config.launch.image == "cluster/image:1"


def test_the_log_and_the_metrics_of_rank_0(training: FakeCluster) -> None:
    run = podscale.attach("r1")
    assert list(map(json.loads, run.logs())) == list(RECORDS)
    assert run.metrics() == list(RECORDS)
    assert [record["loss"] for record in run.metrics("step")] == [2.0]


def test_a_followed_log_ends_with_its_job(training: FakeCluster) -> None:
    lines = podscale.attach("r1").logs(follow=True)
    assert json.loads(next(lines)) == RECORDS[0]
    assert json.loads(next(lines)) == RECORDS[1]
    training.say("r1-worker-0", "last words")
    training.hang_up("r1-worker-0")
    for index in (0, 1):
        training.put("pods", pod(index, phase="Succeeded", state=terminated(0)))
    training.put("pytorchjobs", job(status={"conditions": [condition("Succeeded")]}))
    assert list(lines) == ["last words"]


def test_a_log_that_is_no_longer_read_is_not_followed(training: FakeCluster) -> None:
    earlier = set(threading.enumerate())
    lines = podscale.attach("r1").logs(follow=True)
    next(lines)
    (follower,) = (thread for thread in set(threading.enumerate()) - earlier if thread.name == "log of a pod")
    lines.close()  # as a loop that breaks
    training.say("r1-worker-0", "one more line")
    follower.join(10)
    assert not follower.is_alive()


def test_a_stop_of_the_wait_deletes_the_job_if_asked_to(training: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_stage, "wait_for_job", interrupt)
    run = podscale.attach("r1")
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert len(run.status()) == 1
    with pytest.raises(KeyboardInterrupt):
        run.wait(stop_on_signal=True)
    assert run.status() == []


def test_wait_raises_the_error_of_the_stage(training: FakeCluster) -> None:

    error = "rank 1 makes no progress"

    def fail() -> None:
        training.put("pods", pod(0, phase="Failed", state=terminated(76, error)))
        training.put("pytorchjobs", job(status={"conditions": [condition("Failed")]}))
        training.hang_up("r1-worker-0")

    threading.Timer(0.2, fail).start()
    with pytest.raises(podscale.HangDetected, match=error):
        podscale.attach("r1").wait()


def test_wait_of_an_attached_document_follows_the_jobs_and_submits_nothing(training: FakeCluster) -> None:
    run = podscale.attach(podscale.load("digits", **OPTIONS))
    for index in (0, 1):
        training.put("pods", pod(index, phase="Succeeded", state=terminated(0)))
    training.put("pytorchjobs", job(status={"conditions": [condition("Succeeded")]}))
    run.wait()
    assert [status.stage for status in run.status()] == ["train"]
    run.stop(delete=True, wait=False)
    with refused(field="run r1"):
        run.wait()


def test_wait_for_a_run_without_jobs_is_refused(cluster: FakeCluster) -> None:
    with refused(field="run r2"):
        podscale.attach("r2").wait()


def test_stop_deletes_the_job(training: FakeCluster) -> None:
    run = podscale.attach("r1")
    assert run.stop(wait=False) == ["PyTorchJob r1"]
    assert training.all("pytorchjobs") == []
    assert run.status() == []


def test_a_stage_without_a_job_names_those_that_have_one(training: FakeCluster) -> None:
    with refused(": train", field="run r1"):
        podscale.attach("r1").logs("evaluate")


def test_the_records_of_a_mounted_workspace_are_read_there(training: FakeCluster, tmp_path: Path) -> None:
    config = podscale.load("digits", run={"id": "r1", "workspace": tmp_path})
    run = podscale.attach(config)
    assert run.metrics() == list(RECORDS), "the directory has none yet"
    directory = podscale.Run(config).directory
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text(json.dumps(RECORDS[1]) + "\n")
    assert run.metrics() == [RECORDS[1]]
