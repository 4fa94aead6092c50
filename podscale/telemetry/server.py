"""One endpoint, /metrics, that a stuck or hostile client cannot hold up.

prometheus_client's own server has no time limit and no limit on connections (800 idle sockets hold 802 threads for
ever). This one reads a small request within a total time, answers from rendered bytes, and closes; connections over
the limit are closed at once.
"""

import errno
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

from podscale.errors import InputError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 8192
REQUEST_SECONDS = 5.0


class MetricsServer:
    """Serves `render()` at http://address:port/metrics from its own threads, from `start` until `close`.

    Listening begins with the constructor, so that a taken port is known before anything is started; port 0 takes a
    free one (`port` says which). Raises InputError where the address cannot be listened on.
    """

    def __init__(
        self, address: str, port: int, render: Callable[[], bytes], *, request_seconds: float = REQUEST_SECONDS
    ) -> None:
        try:
            self._server = _Server(address, port, render, request_seconds)
        except OSError as error:
            raise InputError(_explain(address, port, error)) from error
        self.address = address
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._started = False

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"

    def start(self) -> "MetricsServer":
        self._started = True
        self._thread.start()
        return self

    def linger(self, seconds: float, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Waits for one more scrape, at most `seconds` and not once `interrupted`; True where it came."""
        self._server.scraped.clear()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not interrupted():
            if self._server.scraped.wait(min(left, 0.1)):
                return True
        return False

    def close(self) -> None:
        """Stops listening; safe to call twice."""
        if self._started:
            self._server.shutdown()
            self._thread.join()
            self._started = False
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: str, port: int, render: Callable[[], bytes], request_seconds: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.render = render
        self.request_seconds = request_seconds
        self.scraped = threading.Event()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((address, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up or send nonsense are no news."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        words = self._request_line().split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            self._answer("400 Bad Request", b"")
        elif words[1].partition("?")[0] != "/metrics":
            self._answer("404 Not Found", b"only /metrics is here\n")
        elif words[0] not in ("GET", "HEAD"):
            self._answer("405 Method Not Allowed", b"")
        else:
            self._answer("200 OK", self.server.render(), head_only=words[0] == "HEAD")
            self.server.scraped.set()

    def _request_line(self) -> str:
        """Reads to the end of the headers within the time for the whole request."""
        deadline = time.monotonic() + self.server.request_seconds
        received = b""
        while b"\r\n\r\n" not in received and b"\n\n" not in received:
            self.request.settimeout(max(0.001, deadline - time.monotonic()))
            part = self.request.recv(4096)
            received += part
            if not part or len(received) > MAX_REQUEST_BYTES:
                raise ConnectionError("no request")
        return received.split(b"\n", 1)[0].decode("latin-1").strip()

    def _answer(self, status: str, body: bytes, *, head_only: bool = False) -> None:
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        self.request.settimeout(self.server.request_seconds)  # sendall: a limit for the whole of it
        self.request.sendall(head.encode() + (b"" if head_only else body))


def _explain(address: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"telemetry.port {port} on {address} is in use by another process; choose another port, or 0 for any "
            "free one"
        )
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return f"telemetry.address {address}, port {port}: cannot listen there: {reason}"
