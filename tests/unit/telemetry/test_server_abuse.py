"""Scrapes are answered whatever other clients do, even without the time limit of requests (here ten minutes)."""

import resource
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from podscale.config.telemetry import TelemetrySection
from podscale.telemetry.server import MAX_CONNECTIONS, NO_AUTH, EndpointAuth, MetricsServer
from tests.support.certificates import Authority
from tests.support.polling import until

CLIENTS = 160
"""Many times MAX_CONNECTIONS; each takes the server 7 ms, because it ends the thread of the oldest."""
TEXT = b"# HELP a b\n" + b"a 1\n" * 20_000


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Raise the limit of open files, because the clients of these tests are sockets of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 3 * CLIENTS
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(params=["http", "https"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MetricsServer]:
    auth = NO_AUTH
    if request.param == "https":
        pair = Authority(tmp_path).sign("server")
        auth = EndpointAuth.from_section(TelemetrySection(tls_certificate=str(pair.certificate), tls_key=str(pair.key)))
    server = MetricsServer("127.0.0.1", 0, lambda: TEXT, auth=auth, request_seconds=600).start()
    yield server
    server.close()


@pytest.fixture
def clients() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for client in opened:
        client.close()


def scrapes(server: MetricsServer, number: int) -> None:
    """Scrape, and like Prometheus try again if the answer was lost."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def answered() -> bool:
        try:
            with urllib.request.urlopen(server.url, timeout=30, context=context) as answer:
                return bool(answer.read() == TEXT)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    for _ in range(number):
        until(answered, 120)


def connect(server: MetricsServer, clients: list[socket.socket], number: int, sent: bytes = b"") -> None:
    for _ in range(number):
        clients.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        if sent:
            clients[-1].sendall(sent)


def test_idle_clients(server: MetricsServer, clients: list[socket.socket]) -> None:
    """With TLS, such clients never begin the handshake."""
    before = threading.active_count()
    connect(server, clients, CLIENTS)
    scrapes(server, 10)
    assert threading.active_count() - before <= MAX_CONNECTIONS
    assert server.shed_connections > CLIENTS - 2 * MAX_CONNECTIONS
    until(lambda: server.scrapes >= 10)  # it counts after it has answered


def test_clients_that_never_finish_their_request(server: MetricsServer, clients: list[socket.socket]) -> None:
    connect(server, clients, 2 * MAX_CONNECTIONS, b"GET /metrics HTTP/1.1\r\nHost: ")
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.02):
            for client in clients:
                try:
                    client.sendall(b"x")
                except OSError:
                    continue  # the server closed this connection

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        scrapes(server, 10)
    finally:
        over.set()
        thread.join()


def test_clients_that_never_read_their_answer(clients: list[socket.socket], tmp_path: Path) -> None:
    text = TEXT * 200  # larger than the socket's buffers
    server = MetricsServer("127.0.0.1", 0, lambda: text, request_seconds=600).start()
    try:
        connect(server, clients, 2 * MAX_CONNECTIONS, b"GET /metrics HTTP/1.1\r\n\r\n")
        with socket.create_connection(("127.0.0.1", server.port), timeout=120) as scraper:
            scraper.sendall(b"HEAD /metrics HTTP/1.1\r\n\r\n")
            assert scraper.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        server.close()


def test_huge_headers_and_nonsense(server: MetricsServer, clients: list[socket.socket]) -> None:
    nonsense = (b"x" * 100_000, b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, b"\0" * 50, b"\x16\x03\x01" * 99)
    for sent in nonsense * 5:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            try:
                client.sendall(sent)
            except OSError:
                continue  # closed before all of it was sent, as expected
        scrapes(server, 1)


def test_many_scrapers(server: MetricsServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: scrapes(server, 10), range(8)))
    until(lambda: server.scrapes >= 80)  # it counts after it has answered
