"""The metrics endpoint with well-behaved and hostile clients."""

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from podscale.telemetry.server import MAX_CONNECTIONS, ListenError, MetricsServer
from tests.support.refusals import refused


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, lambda: b"a 1\n", request_seconds=0.5).start()
    yield server
    server.close()


def get(server: MetricsServer) -> bytes:
    with urllib.request.urlopen(server.url, timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return bytes(answer.read())


def raw(server: MetricsServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(4096), b""))


def test_serves_only_metrics(server: MetricsServer) -> None:
    assert get(server) == b"a 1\n"
    assert raw(server, b"GET /metrics?name[]=a HTTP/1.1\r\nHost: x\r\n\r\n").endswith(b"\r\n\r\na 1\n")
    assert raw(server, b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n").endswith(
        b"Content-Length: 4\r\nConnection: close\r\n\r\n"
    )
    assert raw(server, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404")
    assert raw(server, b"GET /metrics/../etc HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404")
    assert raw(server, b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405")
    assert raw(server, b"\x16\x03\x01\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_an_error_of_the_exposition_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bytes:
        raise KeyError("no_such_metric")

    broken = MetricsServer("127.0.0.1", 0, fail).start()
    assert raw(broken, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
    broken.close()
    assert "no_such_metric" in caplog.text


def test_a_request_that_never_ends_is_cut_off(server: MetricsServer) -> None:
    assert raw(server, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000) == b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        begin = time.monotonic()
        received = None
        while received != b"" and time.monotonic() - begin < 10:  # one byte at a time does not extend the time
            try:
                client.sendall(b"G")
                client.settimeout(0.05)
                received = client.recv(1)
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                break
        assert time.monotonic() - begin < 5


def test_silent_clients_are_shed_and_the_server_recovers(server: MetricsServer) -> None:
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(4 * MAX_CONNECTIONS)]
    try:
        time.sleep(0.2)
        assert threading.active_count() - before <= MAX_CONNECTIONS
        deadline = time.monotonic() + 10
        while True:
            try:
                assert get(server) == b"a 1\n"
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        for client in silent:
            client.close()


def test_a_taken_port_is_named(server: MetricsServer) -> None:
    with refused("127.0.0.1", field="telemetry.port", got=server.port, kind=ListenError):
        MetricsServer("127.0.0.1", server.port, lambda: b"")


@pytest.mark.parametrize("address", ["192.0.2.1", "no such host"])
def test_an_address_that_is_not_ours_is_named(address: str) -> None:
    with refused(field="telemetry.address", got=address, kind=ListenError):
        MetricsServer(address, 0, lambda: b"")


def test_lingers_until_the_next_scrape(server: MetricsServer) -> None:
    get(server)
    assert server._server.scraped.wait(10)  # set after the answer
    assert server.wait_for_scrape(0.05) is False  # an earlier scrape does not count
    scraper = threading.Timer(0.1, get, [server])
    scraper.start()
    assert server.wait_for_scrape(10) is True
    scraper.join()
    assert server.wait_for_scrape(600, interrupted=lambda: True) is False


def test_a_closed_server_does_not_listen() -> None:
    server = MetricsServer("127.0.0.1", 0, lambda: b"").start()
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
