"""Finding a KFP backend: what is wrong with an address or its credentials is said plainly, before anything is sent."""

import errno
import http.server
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podscale.errors import ABSENT, InputError, PodscaleError
from podscale.pipelines.kfp_endpoint import (
    IN_CLUSTER_ADDRESS,
    BackendUnreachable,
    KfpEndpoint,
    probe_backend,
    resolve_endpoint,
)
from tests.support.kfp_api import KfpApi, kfp_api
from tests.support.refusals import refused


@pytest.fixture
def api() -> Iterator[KfpApi]:
    with kfp_api() as running:
        yield running


@pytest.fixture
def server() -> Iterator[Callable[..., str]]:
    """server(status, type, body, location) -> address of something that answers everything so."""
    running = []

    def start(status: int, content_type: str = "text/html", body: bytes = b"", location: str = "") -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if location and self.path.startswith(location):
                    self.send_response(200)
                else:
                    self.send_response(status)
                if status in (301, 302):
                    self.send_header("Location", "/login")
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        running.append(made)
        return f"http://127.0.0.1:{made.server_port}"

    yield start
    for made in running:
        made.shutdown()
        made.server_close()


def answer_of(endpoint: KfpEndpoint, kind: type[PodscaleError] = InputError, *, got: object = ABSENT) -> PodscaleError:
    with refused(field=endpoint.host, got=got, kind=kind) as refusal:
        probe_backend(endpoint)
    return refusal.error


def test_a_backend_that_answers_says_whether_it_is_shared(api):
    assert probe_backend(KfpEndpoint(api.url)) is False
    api.store.multi_user = True
    assert probe_backend(KfpEndpoint(api.url)) is True


def test_nothing_listens(api):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        error = answer_of(KfpEndpoint(f"http://127.0.0.1:{held.getsockname()[1]}"), BackendUnreachable)
    assert os.strerror(errno.ECONNREFUSED) in error.problem
    assert "kubectl port-forward" in error.hint


@pytest.mark.parametrize(
    ("code", "error"),
    [(socket.EAI_NONAME, InputError), (socket.EAI_AGAIN, BackendUnreachable)],
)
def test_an_unknown_name_differs_from_a_name_server_that_does_not_answer(monkeypatch, code, error):
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(code, "try again")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    answer_of(KfpEndpoint("http://kfp.example"), error)


def test_plain_http_where_tls_was_meant(api):
    assert "http://" in answer_of(KfpEndpoint(api.url.replace("http://", "https://"))).hint


@pytest.mark.parametrize(
    ("status", "content_type", "body", "says"),
    [
        (200, "text/html", b"<html>", "text/html"),
        (200, "application/json", b"[1]", "application/json"),
        (404, "text/plain", b"no", "text/plain"),
        (302, "text/html", b"", "--token-file"),
        (401, "text/html", b"", "--token-file"),
        (403, "text/html", b"", "--namespace"),
    ],
)
def test_something_else_answers(server, status, content_type, body, says):
    error = answer_of(KfpEndpoint(server(status, content_type, body)), got=status)
    assert says in str(error)
    assert ("login" in str(error)) == (status in (302, 401, 403))


def test_a_backend_that_is_not_well_may_become_so(server):
    answer_of(KfpEndpoint(server(502)), BackendUnreachable, got=502)


def test_an_old_kfp_differs_from_no_kfp(server):
    error = answer_of(KfpEndpoint(server(404, "application/json", b"{}", location="/apis/v1beta1/healthz")))
    assert "2.15" in error.hint


def test_a_token_is_read_again_at_every_use(api, tmp_path):
    api.store.token = "second"
    path = tmp_path / "token"
    path.write_text("first\n")
    endpoint = KfpEndpoint(api.url, token_file=path)
    assert "the token" in answer_of(endpoint, got=401).problem
    path.write_text("second\n")
    assert probe_backend(endpoint) is False


def test_a_token_file_that_is_not_there(api, tmp_path):
    with refused(os.strerror(errno.ENOENT), field=tmp_path / "t"):
        probe_backend(KfpEndpoint(api.url, token_file=tmp_path / "t"))


def test_the_address_comes_from_the_option_then_the_environment_then_the_cluster():
    variables = {"KF_PIPELINES_ENDPOINT": "https://kfp.example.com/pipeline/", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert resolve_endpoint("localhost:8888", environment=variables).host == "http://localhost:8888"
    assert resolve_endpoint(None, environment=variables).host == "https://kfp.example.com/pipeline"
    assert resolve_endpoint(None, environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).host == IN_CLUSTER_ADDRESS
    with refused("kubectl port-forward", field="--host", got=ABSENT):
        resolve_endpoint(None, environment={})


@pytest.mark.parametrize("address", ["ftp://kfp", "https://", "kfp:port"])
def test_an_address_that_is_none(address):
    with refused(field="--host", got=address):
        resolve_endpoint(address, environment={})


def test_credentials_come_from_the_environment(tmp_path: Path):
    resolved = resolve_endpoint(
        "kfp", environment={"PODSCALE_KFP_TOKEN": "t", "PODSCALE_KFP_COOKIES": "authservice_session=x"}
    )
    assert (resolved.host, resolved.read_token(), resolved.cookies) == ("https://kfp", "t", "authservice_session=x")
    assert resolve_endpoint("kfp", environment={"KF_PIPELINES_SA_TOKEN_PATH": "/t"}).token_file == Path("/t")


@pytest.mark.parametrize("name", ["absent", ".", "text"])
def test_a_certificate_authority_that_is_none(name: str, tmp_path: Path):
    (tmp_path / "text").write_text("no certificate")
    with refused(field="--ca-file", got=str(tmp_path / name)):
        resolve_endpoint("kfp", ca_file=tmp_path / name, environment={})


def test_links_lead_to_the_user_interface():
    assert KfpEndpoint("https://api", ui="https://ui/pipeline/").link("runs/details/7") == (
        "https://ui/pipeline/#/runs/details/7"
    )
    assert KfpEndpoint("https://api").link("runs/details/7") == "https://api/#/runs/details/7"
