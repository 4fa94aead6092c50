"""The status of a TrainJob, sent over real TLS to a server with the checks of Kubeflow Trainer's."""

import http.server
import json
import os
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from podscale.telemetry.events import EventRecord
from podscale.telemetry.trackers.base import LaunchExit
from podscale.telemetry.trackers.trainjob import TrainJobStatus, is_enabled
from tests.support import crds
from tests.support.certificates import Authority
from tests.support.run_records import evaluation_record, launch_record, step_record

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/n/trainjobs/t/status"
MOST_BYTES = 2**16


@dataclass
class StatusServer:
    """Checks of Trainer's status server: method, path, token, size and form of the body."""

    url: str
    token: str = "first"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    def answer(self, path: str, bearer: str, body: bytes) -> int:
        if path != PATH:
            return 404
        if bearer != f"Bearer {self.token}":
            return 403
        if len(body) > MOST_BYTES:
            return 413
        self.bodies.append(json.loads(body))
        return 200


@dataclass
class TrainJobServer:
    """Set the three variables of a pod, and start the server that they name."""

    server: StatusServer
    environment: dict[str, str]
    token: Path
    warnings: list[str] = field(default_factory=list)

    def tracker(self, interval: float = 0.0) -> TrainJobStatus:
        return TrainJobStatus(self.environment, self.warnings.append, interval)

    @property
    def newest(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.bodies[-1]["trainerStatus"]
        return found


@pytest.fixture
def trainjob(tmp_path: Path, authority: Authority) -> Iterator[TrainJobServer]:
    status = StatusServer("")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code = status.answer(self.path, self.headers["Authorization"], body)
            if code != 200:
                status.refused.append(code)
            self.send_response(code)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    pair = authority.sign("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    status.url = f"https://127.0.0.1:{server.server_address[1]}{PATH}"
    token = tmp_path / "token"
    token.write_text("first\n")
    environment = {
        "KUBEFLOW_TRAINER_SERVER_URL": status.url,
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(authority.pair.certificate),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token),
    }
    yield TrainJobServer(status, environment, token)
    server.shutdown()
    server.server_close()


def send(tracker: TrainJobStatus, *records: EventRecord) -> None:
    for record in records:
        tracker.add(record)
    tracker.flush()


def test_nothing_is_reported_before_training_begins(trainjob: TrainJobServer) -> None:
    tracker = trainjob.tracker()
    send(tracker)
    assert trainjob.server.bodies == []
    send(tracker, launch_record(0))
    assert trainjob.newest["progressPercentage"] == 0
    assert "estimatedRemainingSeconds" not in trainjob.newest


def test_how_far_a_training_is(trainjob: TrainJobServer) -> None:
    tracker = trainjob.tracker()
    send(tracker, launch_record(0), step_record(10), evaluation_record(10))
    status = trainjob.newest
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (20, 40)
    metrics = {metric["name"]: metric["value"] for metric in status["metrics"]}
    assert metrics["train/loss"] == "1"
    assert metrics["evaluation/top1"] == "0.5"
    assert metrics["throughput/images_per_second"] == "1000"
    age = datetime.now(UTC) - datetime.fromisoformat(status["lastUpdatedTime"])
    assert abs(age.total_seconds()) < 600
    send(tracker, step_record(50, None))
    assert trainjob.newest["progressPercentage"] == 99, "the model is not written yet"
    assert {"name": "train/loss", "value": "nan"} in trainjob.newest["metrics"]
    tracker.close(LaunchExit(0))
    assert (trainjob.newest["progressPercentage"], trainjob.newest["estimatedRemainingSeconds"]) == (100, 0)
    assert trainjob.warnings == []


def test_a_report_fits_the_definition_of_a_trainjob(trainjob: TrainJobServer) -> None:
    tracker = trainjob.tracker()
    send(tracker, launch_record(0), step_record(10, None), evaluation_record(10))
    for number in range(400):
        tracker._values[f"n{number}"] = 1.0
    tracker._values["x" * 65] = 1.0
    tracker.close(LaunchExit(0))
    assert len(trainjob.newest["metrics"]) == 256
    for body in trainjob.server.bodies:
        crds.validate_status("TrainJob", body)


def test_a_run_that_is_continued_or_fails(trainjob: TrainJobServer) -> None:
    tracker = trainjob.tracker()
    send(tracker, launch_record(0), step_record(30), launch_record(10, 200.0))
    assert trainjob.newest["progressPercentage"] == 20
    assert "estimatedRemainingSeconds" not in trainjob.newest
    tracker.close(LaunchExit(1, "boom"))
    assert trainjob.newest["progressPercentage"] == 20


def test_a_training_that_reaches_its_target_early_is_done(trainjob: TrainJobServer) -> None:
    tracker = trainjob.tracker()
    send(tracker, launch_record(0), step_record(10))
    tracker.close(LaunchExit(0))
    assert trainjob.newest["progressPercentage"] == 100


def test_the_token_is_read_for_each_request(trainjob: TrainJobServer) -> None:
    tracker = trainjob.tracker()
    send(tracker, launch_record(0))
    trainjob.server.token = "second"
    replacement = trainjob.token.with_name("new")
    replacement.write_text("second")
    replacement.replace(trainjob.token)
    send(tracker, step_record(1))
    assert trainjob.server.refused == []
    assert len(trainjob.server.bodies) == 2


def test_progress_is_reported_once_an_interval_and_at_the_end(trainjob: TrainJobServer) -> None:
    tracker = trainjob.tracker(interval=3600.0)
    send(tracker, launch_record(0), step_record(1))
    send(tracker, step_record(2))
    assert len(trainjob.server.bodies) == 1
    tracker.close(LaunchExit(0))
    assert len(trainjob.server.bodies) == 2


def break_server(trainjob: TrainJobServer, tmp_path: Path, problem: str) -> None:
    match problem:
        case "other authority":
            (tmp_path / "other").mkdir()
            trainjob.environment["KUBEFLOW_TRAINER_SERVER_CA_CERT"] = str(
                Authority(tmp_path / "other").pair.certificate
            )
        case "no token":
            trainjob.token.unlink()
        case "revoked token":
            trainjob.server.token = "another"
        case "no server":
            trainjob.environment["KUBEFLOW_TRAINER_SERVER_URL"] = "https://127.0.0.1:9/status"
        case "no TLS":
            trainjob.environment["KUBEFLOW_TRAINER_SERVER_URL"] = trainjob.server.url.replace("https", "http")
        case "newline in token":
            trainjob.token.write_text("a\r\nX-Evil: b")


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("other authority", "CERTIFICATE_VERIFY_FAILED"),
        ("no token", "No such file"),
        ("revoked token", "403 Forbidden"),
        ("no server", "refused"),
        ("no TLS", "is not an https:// URL"),
        ("newline in token", "Invalid header value"),
    ],
)
def test_an_outage_costs_one_warning(trainjob: TrainJobServer, tmp_path: Path, problem: str, message: str) -> None:
    break_server(trainjob, tmp_path, problem)
    tracker = trainjob.tracker()
    send(tracker, launch_record(0))
    send(tracker, step_record(1))
    tracker.close(LaunchExit(0))
    (warning,) = trainjob.warnings
    assert message in warning
    assert "first" not in warning
    assert trainjob.server.bodies == []


def test_it_goes_on_after_an_outage(trainjob: TrainJobServer) -> None:
    tracker = trainjob.tracker()
    trainjob.server.token = "later"
    send(tracker, launch_record(0))
    trainjob.server.token = "first"
    send(tracker, step_record(1))
    assert len(trainjob.server.bodies) == 1
    assert len(trainjob.warnings) == 1


def test_no_proxy_sees_the_token(trainjob: TrainJobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    send(trainjob.tracker(), launch_record(0))
    assert len(trainjob.server.bodies) == 1


def test_it_is_enabled_when_all_three_variables_are_set(trainjob: TrainJobServer) -> None:
    assert not is_enabled({})
    assert not is_enabled({**os.environ})
    assert is_enabled(trainjob.environment)
    for name in trainjob.environment:
        assert not is_enabled({**trainjob.environment, name: ""})
