"""`podscale watch` of a job on the cluster double: records from the log of rank 0, metrics from the pods."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.cli import main
from podscale.kubernetes import logs
from podscale.kubernetes.job_spec import METRICS_PORT
from podscale.monitoring.watch import sources
from tests.support.cluster_objects import condition, job, pod, terminated
from tests.support.fake_cluster import FakeCluster
from tests.support.outcomes import assert_error

START = {"time": 1.0, "kind": "event", "event": "start", "step": 0, "total_steps": 10, "ranks": 2}
STEP = {
    "time": 2.0,
    "kind": "step",
    "step": 4,
    "epoch": 0.5,
    "loss": 1.5,
    "learning_rate": 0.1,
    "images_per_second": 250.0,
    "phases": {"forward_backward": 1.0},
}


@pytest.fixture
def training(cluster: FakeCluster) -> FakeCluster:
    """Job of two pods that has logged one step."""
    cluster.put("pytorchjobs", job())
    for index in (0, 1):
        cluster.put("pods", pod(index))
        labels = f'run="r1",rank="{index}"'
        cluster.served[f"r1-worker-{index}:{METRICS_PORT}"] = (
            f"podscale_train_images_total{{{labels}}} 400\n"
            f"podscale_train_step_duration_seconds_sum{{{labels}}} {10 * (index + 1)}\n"
        )
    cluster.say("r1-worker-0", "metrics at http://0.0.0.0:9464/metrics")  # a line that is no record is skipped
    for record in (START, STEP):
        cluster.say("r1-worker-0", json.dumps(record))
    return cluster


def watched(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["watch", "r1", "--once", "--json"]) == 0
    status: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status


def test_a_job_is_seen_with_all_its_ranks(training: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    status = watched(capsys)
    assert status["run"] == "PyTorchJob r1 in namespace train"
    assert (status["step"], status["total_steps"], status["images_per_second"]) == (4, 10, 250.0)
    for part in ("running", "2 of 2 pods"):
        assert part in status["headline"]
    ranks = [(rank["pod"], rank["images_per_second"]) for rank in status["rank_figures"]]
    assert ranks == [("r1-worker-0", 40.0), ("r1-worker-1", 20.0)]


def test_a_pod_that_does_not_answer_is_left_out(training: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    del training.served[f"r1-worker-1:{METRICS_PORT}"]
    assert [rank["rank"] for rank in watched(capsys)["rank_figures"]] == [0]


def test_pods_that_hang_cost_the_time_of_one(
    training: FakeCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(2, 12):
        training.put("pods", pod(index))
    answered = threading.Event()
    monkeypatch.setattr(sources, "SCRAPE_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(sources.JobSource, "_scrape", lambda self, pod, texts: answered.wait(30.0))
    began = time.monotonic()
    assert watched(capsys)["rank_figures"] == []
    answered.set()
    assert time.monotonic() - began < 12 * 2 * 0.1


def test_without_the_right_to_reach_pods_the_rest_is_shown(
    training: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    training.denied.add(("get", "pods/proxy"))
    status = watched(capsys)
    assert (status["step"], status["rank_figures"]) == (4, [])
    assert "pods/proxy" in status["headline"]


DOCUMENTS = {
    "a token": ({"bearer_token_file": "/t"}, "a token"),
    "a certificate": ({"tls_certificate": "/c", "tls_key": "/k", "tls_client_ca": "/a"}, "a client certificate"),
}


@pytest.mark.parametrize("expected", DOCUMENTS)
def test_pods_that_want_what_the_api_server_does_not_pass_on(
    training: FakeCluster, capsys: pytest.CaptureFixture[str], expected: str
) -> None:
    section, words = DOCUMENTS[expected]
    for index in (0, 1):
        training.put("pods", with_document(pod(index), section))
    status = watched(capsys)
    assert (status["step"], status["rank_figures"]) == (4, [])
    assert words in status["headline"]


def test_pods_that_serve_https(training: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    for index in (0, 1):
        training.put("pods", with_document(pod(index), {"tls_certificate": "/c", "tls_key": "/k"}))
        address = f"r1-worker-{index}:{METRICS_PORT}"
        training.served[f"https:{address}"] = training.served.pop(address)
    assert [rank["rank"] for rank in watched(capsys)["rank_figures"]] == [0, 1]


def with_document(made: dict[str, Any], telemetry: dict[str, Any]) -> dict[str, Any]:
    """Return the pod with a telemetry section in the document of its container."""
    document = {"name": "PODSCALE_RUN_DOCUMENT", "value": yaml.safe_dump({"telemetry": telemetry})}
    made["spec"]["containers"] = [{"name": "pytorch", "env": [document]}]
    return made


def test_a_job_is_followed_to_its_end(
    training: FakeCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.02)
    training.say("r1-worker-0", json.dumps({**STEP, "time": 3.0, "step": 10}))
    training.hang_up("r1-worker-0")
    training.put("pods", pod(0, state=terminated(0), phase="Succeeded"))
    training.put("pytorchjobs", job(status={"conditions": [condition("Succeeded")]}))
    assert main(["watch", "r1", "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["step"], last["headline"]) == (10, "succeeded")


def test_a_run_that_is_nowhere(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert_error(main(["watch", "r9"]), capsys.readouterr().err, "runs/r9", "namespace train", field="run r9")


def test_the_job_of_a_document_is_found_without_its_directory(
    training: FakeCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document of a job that `submit` started may still have the backend `local`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("run: {id: r1}\n")
    training.put("pytorchjobs", job(status={"conditions": [condition("Succeeded")]}))
    assert main(["watch", "run.yaml", "--once", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["run"], status["step"]) == ("PyTorchJob r1 in namespace train", 4)
    assert status["headline"].startswith("succeeded")
