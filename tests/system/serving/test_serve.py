"""`podscale serve` as real processes: the rows of `podscale predict`, over real HTTP."""

import http.client
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from podscale.export.export_model import export_model
from podscale.export.export_options import ExportOptions
from podscale.prediction.predict import predict
from podscale.prediction.predictor import PredictOptions
from podscale.prediction.writers import row_of
from podscale.telemetry.catalogue import CATALOGUE
from podscale.util.files import file_sha256
from podscale.util.processes import is_alive
from tests.support.exposition import foreign, names, scrape
from tests.support.polling import until
from tests.support.ports import free_port
from tests.support.prediction import CLASSES, odd_images, photograph, write_model_run, write_photographs
from tests.support.serving import JPEG, Answer, Server, at_once, running_server

IMAGE = photograph(1)
FORM = "multipart/form-data; boundary=limit"
REQUEST_SECONDS = 1.5
HELD_SECONDS = 0.7
"""Time for which a batch of the server `strict` waits for more images."""
QUEUE, CONNECTIONS = 4, 12
METRICS_PORT = free_port()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = write_model_run(tmp_path_factory.mktemp("model"))
    return Path(config.run.workspace) / "runs" / config.run.id


@pytest.fixture(scope="module")
def server(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server with the default limits."""
    with running_server(run, tmp_path_factory.mktemp("server"), "--max-request-mib", "1") as server:
        yield server


@pytest.fixture(scope="module")
def strict(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server with narrow limits, whose batches wait for HELD_SECONDS, so that images are in the queue for that time."""
    limits = f"--queue {QUEUE} --max-connections {CONNECTIONS} --request-seconds {REQUEST_SECONDS} --max-batch 64"
    options = [*limits.split(), "--max-wait-ms", str(1000 * HELD_SECONDS), "--drain-seconds", "1", "--convert"]
    options += ["--metrics-port", str(METRICS_PORT)]
    with running_server(run, tmp_path_factory.mktemp("strict"), *options) as server:
        yield server


def test_single_images_have_the_rows_of_predict(server: Server, run: Path, tmp_path: Path) -> None:
    """Requests one after the other are batches of one image, whose probabilities are equal to the last digit."""
    paths = write_photographs(tmp_path, 6)
    rows = [row_of(one) for one in predict(run, [str(tmp_path)], PredictOptions(batch=1))]
    for path, row in zip(paths, rows, strict=True):
        assert server.predict(path.read_bytes()).row == {**row, "image": ""}
    assert len({tuple(row["classes"]) for row in rows}) > 1, "the model tells images apart"


def test_a_form_has_a_row_for_each_file(server: Server, run: Path, tmp_path: Path) -> None:
    paths = write_photographs(tmp_path, 7)
    rows = [row_of(one) for one in predict(run, [str(tmp_path)], PredictOptions(batch=1, top=2))]
    answer = server.predict_files([(path.name, path.read_bytes()) for path in paths], "?top=2")
    assert (answer.status, len(answer.json["predictions"])) == (200, 7)
    for path, row, served in zip(paths, rows, answer.json["predictions"], strict=True):
        np.testing.assert_allclose(served.pop("probabilities"), row.pop("probabilities"), atol=1.5e-6)
        assert served == {**row, "image": path.name}


def test_images_at_once_share_batches(server: Server) -> None:
    before = [server.value("batch_images_count"), server.value("batch_images_sum")]
    answers = at_once([lambda: server.predict_files([("a.jpg", IMAGE)] * 8)] * 6)
    assert {answer.status for answer in answers} == {200}
    batches, images = server.value("batch_images_count") - before[0], server.value("batch_images_sum") - before[1]
    assert images == 48
    assert batches < 24, "batches of more than two images on average"


@pytest.mark.parametrize("name", list(odd_images()))
def test_odd_images_get_an_answer(name: str, server: Server) -> None:
    data, reason, _ = odd_images()[name]
    answer = server.predict(data)
    assert (answer.status, answer.row["reason"]) == (200 if reason is None else 400, reason)
    assert len(answer.row["classes"]) == (5 if reason is None else 0)
    mixed = server.predict_files([(name, data), ("good.jpg", IMAGE)])
    assert (mixed.status, [row["reason"] for row in mixed.json["predictions"]]) == (200, [reason, None])


def test_images_of_other_formats_are_converted_if_asked(strict: Server) -> None:
    files = [(name, data) for name, (data, reason, _) in odd_images().items() if reason in ("unusable_format", None)]
    answer = strict.predict_files(files[:QUEUE])
    assert [row["reason"] for row in answer.json["predictions"]] == [None] * QUEUE


def test_bodies_that_are_being_received_cannot_fill_the_memory(server: Server) -> None:
    """The limit is four bodies of 1 MiB."""
    length = 2**20
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: {FORM}\r\nContent-Length: {length}\r\n\r\n"
    clients = [server.connect() for _ in range(5)]
    for client in clients:
        client.sendall(head.encode() + bytes(length - 1))
    refused = [client for client in clients if _answers(client)]
    assert len(refused) >= 1
    assert all(client.recv(1000).startswith(b"HTTP/1.1 503 ") for client in refused)
    for client in clients:
        client.close()
    until(lambda: server.predict(IMAGE).status == 200)


def _answers(client: socket.socket) -> bool:
    """Return True if an answer arrives within a second."""
    return bool(select.select([client], [], [], 1.0)[0])


def test_answers_do_not_wait_for_the_acknowledgement_of_their_headers(server: Server) -> None:
    """An answer is two writes: without TCP_NODELAY, the second one waits 40 ms for the client's delayed ACK."""
    connection, seconds = http.client.HTTPConnection("127.0.0.1", server.port), []
    for _ in range(30):
        started = time.monotonic()
        connection.request("GET", "/livez")
        connection.getresponse().read()
        seconds.append(time.monotonic() - started)
    connection.close()
    assert min(seconds[10:]) < 0.03  # the first answers of a connection are acknowledged at once


def test_requests_that_cannot_be_answered_are_refused_with_a_reason(server: Server) -> None:
    too_many = server.predict_files([("a", b"x")] * 300)
    form = {"Content-Type": FORM}
    refused = {
        "large": server.predict(bytes(2**20 + 1)),
        "large form": server.request("POST", "/predict", bytes(2**20 + 1), form),
        "many": too_many,
        "type": server.request("POST", "/predict", IMAGE, {"Content-Type": "text/html"}),
        "top": server.predict(IMAGE, "?top=0"),
        "cut form": server.request("POST", "/predict", b'--limit\r\nContent-Disposition: form-data; name="a"', form),
        "empty form": server.request("POST", "/predict", b"--limit--\r\n", form),
        "no boundary": server.request("POST", "/predict", b"x", {"Content-Type": "multipart/form-data"}),
        "chunked": server.request("POST", "/predict", iter([bytes(2**19)] * 3), JPEG),
        "method": server.request("PUT", "/predict", IMAGE, JPEG),
        "path": server.request("GET", "/favicon.ico"),
    }
    assert {name: (answer.status, answer.json["reason"]) for name, answer in refused.items()} == {
        "large": (413, "too_many_bytes"),
        "large form": (413, "too_many_bytes"),
        "many": (413, "too_many_images"),
        "type": (415, "unusable_content_type"),
        "top": (400, "invalid_top"),
        "cut form": (400, "invalid_form"),
        "empty form": (400, "no_images"),
        "no boundary": (400, "invalid_form"),
        "chunked": (413, "too_many_bytes"),
        "method": (405, "method not allowed"),
        "path": (404, "not found"),
    }
    assert server.predict(IMAGE).status == 200


def test_the_model_describes_itself(server: Server, run: Path) -> None:
    answer = server.request("GET", "/").json
    assert (answer["model"], answer["classes"], answer["image_size"]) == ("small", CLASSES, 32)
    assert answer["weights"] == file_sha256(run / "model" / "model.safetensors")
    assert sorted(server.predict(IMAGE, "?top=100").row["classes"]) == CLASSES


def test_metrics_are_those_of_the_catalogue(server: Server) -> None:
    server.predict(b"no image")
    text = server.metrics()
    assert foreign(text) == []
    assert names(text) == {name for name, entry in CATALOGUE.items() if entry.exporter == "server"}
    assert server.value("image_failures_total", reason="not_an_image") >= 1
    assert server.value("requests_total", code="400") >= 1
    assert server.value("queue_images") == 0
    if shutil.which("promtool"):
        check = subprocess.run(["promtool", "check", "metrics"], input=text.encode(), capture_output=True)
        assert (check.returncode, check.stdout + check.stderr) == (0, b"")


def test_metrics_and_probes_have_a_port_of_their_own(strict: Server) -> None:
    assert names(scrape(f"http://127.0.0.1:{METRICS_PORT}/metrics")) >= {"serve_ready"}
    assert scrape(f"http://127.0.0.1:{METRICS_PORT}/healthz") == "ready\n"


def test_a_full_queue_refuses_and_says_when_to_come_back(strict: Server) -> None:
    answers = at_once([lambda: strict.predict(IMAGE)] * 10)
    codes = sorted(answer.status for answer in answers)
    assert codes == [200] * QUEUE + [503] * (10 - QUEUE)
    refused = next(answer for answer in answers if answer.status == 503)
    assert refused.json["reason"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    assert strict.value("requests_total", code="503") == 10 - QUEUE
    assert strict.predict(IMAGE).status == 200


def test_slow_clients_are_closed_and_do_not_block_others(strict: Server) -> None:
    started = time.monotonic()
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: 5000\r\n"
    silent, headless, bodiless = (strict.connect() for _ in range(3))
    headless.sendall(head)
    bodiless.sendall(head + b"\r\nabc")
    for _ in range(2):
        assert strict.predict(IMAGE).status == 200, "answered while three clients wait"
        headless.sendall(b"X-More: 1\r\n")
    assert bodiless.recv(1000).startswith(b"HTTP/1.1 408 "), "the body is late"
    assert headless.recv(1000) == b""
    assert silent.recv(1000) == b""
    assert time.monotonic() - started < 2 * HELD_SECONDS + 2 * REQUEST_SECONDS + 5
    assert strict.value("connections_closed_total", cause="timeout") >= 2


def test_too_many_connections_close_the_oldest_that_is_idle(strict: Server) -> None:
    results: list[Answer] = []
    busy = threading.Thread(target=lambda: results.append(strict.predict(IMAGE)))
    busy.start()
    until(lambda: strict.value("queue_images") == 1)
    idle = [strict.connect() for _ in range(3 * CONNECTIONS)]
    assert strict.status("/livez") == 200, "probes are answered"
    busy.join()
    assert [answer.status for answer in results] == [200], "a request in progress is not closed"
    assert strict.value("connections_closed_total", cause="evicted") >= 2 * CONNECTIONS
    for connection in idle:
        connection.close()


def test_sigterm_drops_the_readiness_and_answers_what_was_accepted(strict: Server) -> None:
    """The last test of this server."""
    results: list[int] = []
    clients = [threading.Thread(target=lambda: results.append(strict.predict(IMAGE).status)) for _ in range(QUEUE)]
    until(lambda: strict.value("queue_images") == 0)
    for client in clients:
        client.start()
    until(lambda: strict.value("queue_images") == QUEUE)
    strict.command.process.send_signal(signal.SIGTERM)
    until(lambda: strict.status("/healthz") == 503)
    assert strict.status("/livez") == 200
    late = strict.request("GET", "/")
    assert (late.status, late.headers["connection"]) == (200, "close")
    for client in clients:
        client.join()
    assert results == [200] * QUEUE
    ended = strict.command.end()
    assert ended.code == 0, ended.err
    assert strict.status("/healthz") == 0


def test_processes_share_the_port_and_stop_together(run: Path, tmp_path: Path) -> None:
    with running_server(run, tmp_path, "--processes", "2") as server:
        until(lambda: server.value("ready") == 2)
        for _ in range(20):
            assert server.predict(IMAGE).status == 200
        until(lambda: server.value("images_total") == 20)
        children = [pid for pid in server.command.members() if b"spawn_main" in _cmdline(pid)]
        assert len(children) == 2
        os.kill(children[0], signal.SIGKILL)
        ended = server.command.end()
    assert ended.code == 128 + signal.SIGKILL
    assert not any(map(is_alive, children))


def test_an_exported_file_is_served_with_its_own_rows(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    export_model(run, ExportOptions(out=file, preprocessing=True, limit=3))
    (path,) = write_photographs(tmp_path, 1)
    (row,) = map(row_of, predict(file, [str(path)]))
    with running_server(file, tmp_path, "--drain-seconds", "1000") as server:
        served, answer = server.predict(path.read_bytes()).row, server.request("GET", "/").json
        server.command.process.send_signal(signal.SIGTERM)
        until(lambda: server.status("/healthz") == 503)
        server.command.process.send_signal(signal.SIGTERM)
        assert server.command.end().code == 0, "a second SIGTERM ends the drain"
    np.testing.assert_allclose(served.pop("probabilities"), row.pop("probabilities"), atol=1.5e-6)
    assert served == {**row, "image": ""}
    assert (answer["model"], answer["exported"]) == ("small", file_sha256(file))
    assert answer["weights"] == file_sha256(run / "model" / "model.safetensors")


def _cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
