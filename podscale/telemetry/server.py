"""HTTP server of /metrics with TLS, client certificates and a token, that a stuck or hostile client cannot block.

prometheus_client's own server has no timeout and no connection limit (800 idle sockets hold 802 threads forever), and
with TLS one silent client blocks all others. Here a request has a size and a time limit, and the TLS handshake runs on
the connection's own thread. If too many connections are open, the oldest is closed. A scrape takes milliseconds, so it
is rarely the oldest.
"""

import errno
import hmac
import logging
import os
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podscale.config.telemetry import TelemetrySection
from podscale.errors import InputError
from podscale.telemetry.endpoint import openssl_reason

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 8192
REQUEST_SECONDS = 5.0
EVICTION_SECONDS = 2.0
"""Timeout for the exit of a closed connection's thread, seconds."""


class ListenError(InputError):
    """The metrics server cannot listen on its address."""


@dataclass(frozen=True)
class EndpointAuth:
    """Authentication of the endpoint.

    Args:
        tls: TLS context, which may require client certificates; None for plain HTTP.
        token: Bearer token that every request must carry.
    """

    tls: ssl.SSLContext | None = None
    token: bytes | None = None

    @classmethod
    def from_section(cls, section: TelemetrySection) -> "EndpointAuth":
        """Read certificates and token once; later changes of the files have no effect. Raises InputError."""
        return cls(_tls_context(section), _read_token(section.bearer_token_file))

    def is_authorized(self, headers: Iterable[bytes]) -> bool:
        """Check the token in these header lines, in constant time."""
        if self.token is None:
            return True
        for header in headers:
            name, _, value = header.partition(b":")
            scheme, _, token = value.strip().partition(b" ")
            if name.lower() == b"authorization" and scheme.lower() == b"bearer":
                return hmac.compare_digest(token.strip(), self.token)
        return False


NO_AUTH = EndpointAuth()


class MetricsServer:
    """Server of `render()` at http(s)://address:port/metrics on its own threads, from `start` until `close`.

    The constructor binds the port. Raises ListenError.

    Args:
        port: 0 for any free one; the attribute holds the actual port.
        request_seconds: Time limit of a request.
    """

    def __init__(
        self,
        address: str,
        port: int,
        render: Callable[[], bytes],
        *,
        auth: EndpointAuth = NO_AUTH,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        try:
            self._server = _Server(address, port, render, auth, request_seconds)
        except (OSError, UnicodeError) as error:
            raise _listen_error(address, port, error) from error
        self.port: int = self._server.server_address[1]
        host = f"[{address}]" if ":" in address else address
        self.url = f"http{'s' if auth.tls is not None else ''}://{host}:{self.port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._started = False

    @property
    def scrapes(self) -> int:
        return self._server.scrapes

    @property
    def shed_connections(self) -> int:
        """Connections closed without an answer because too many were open."""
        return self._server.shed_connections

    def start(self) -> "MetricsServer":
        self._started = True
        self._thread.start()
        return self

    def wait_for_scrape(self, seconds: float, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Wait for one more scrape, for at most `seconds` or until `interrupted`; return whether there was one."""
        self._server.scraped.clear()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not interrupted():
            if self._server.scraped.wait(min(left, 0.1)):
                return True
        return False

    def close(self) -> None:
        """Stop listening; safe to call twice."""
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

    def __init__(
        self, address: str, port: int, render: Callable[[], bytes], auth: EndpointAuth, request_seconds: float
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.render, self.auth, self.request_seconds = render, auth, request_seconds
        self.scraped = threading.Event()
        self.scrapes = self.shed_connections = 0
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: OrderedDict[int, socket.socket] = OrderedDict()
        super().__init__((address, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the connection's thread; if too many are open, close the oldest connection first."""
        if not self._free.acquire(blocking=False):
            self.shed_connections += 1
            self._evict()
            if not self._free.acquire(timeout=EVICTION_SECONDS):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[id(request)] = request
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._release(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(request)

    def wrap_tls(self, request: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Return the connection after the TLS handshake; called on the connection's own thread."""
        with self._lock:  # wrap_socket detaches the old socket, so an eviction must close the new one
            tls_socket = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            if id(request) in self._open:
                self._open[id(request)] = tls_socket
        tls_socket.settimeout(self.request_seconds)
        tls_socket.do_handshake()
        return tls_socket

    def count_scrape(self) -> None:
        with self._lock:
            self.scrapes += 1
        self.scraped.set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of ours; ignore clients that close the connection or send an invalid request."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("a scrape of the metrics failed")

    def _evict(self) -> None:
        """Shut down the oldest connection, which ends its thread."""
        with self._lock, suppress(OSError):
            if self._open:
                _, oldest = self._open.popitem(last=False)
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)  # not SSLSocket's: another thread uses its SSL object

    def _release(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        self._free.release()


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        tls = self.server.auth.tls
        if tls is None:
            self._respond(self.request)
            return
        with self.server.wrap_tls(self.request, tls) as connection:
            self._respond(connection)

    def _respond(self, connection: socket.socket) -> None:
        request_line, *headers = self._read_request(connection).split(b"\n")
        method, _, target = request_line.decode("latin-1").strip().partition(" ")
        path, _, version = target.partition(" ")
        if " " in version or not version.startswith("HTTP/1."):
            self._send(connection, "400 Bad Request", b"")
        elif path.partition("?")[0] != "/metrics":
            self._send(connection, "404 Not Found", b"only /metrics is served\n")
        elif method not in ("GET", "HEAD"):
            self._send(connection, "405 Method Not Allowed", b"")
        elif not self.server.auth.is_authorized(headers):
            self._send(connection, "401 Unauthorized", b"", "WWW-Authenticate: Bearer\r\n")
        else:
            self._send(connection, "200 OK", self.server.render(), head_only=method == "HEAD")
            self.server.count_scrape()

    def _read_request(self, connection: socket.socket) -> bytes:
        """Read to the end of the headers, within the time limit of the request."""
        deadline = time.monotonic() + self.server.request_seconds
        received = b""
        while b"\r\n\r\n" not in received and b"\n\n" not in received:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = connection.recv(4096)
            received += chunk
            if not chunk or len(received) > MAX_REQUEST_BYTES:
                raise ConnectionError("no request")
        return received

    def _send(
        self, connection: socket.socket, status: str, body: bytes, header: str = "", *, head_only: bool = False
    ) -> None:
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
            f"{header}Connection: close\r\n\r\n"
        )
        connection.settimeout(self.server.request_seconds)  # of the whole sendall
        connection.sendall(head.encode() + (b"" if head_only else body))


def _listen_error(address: str, port: int, error: Exception) -> ListenError:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        hint = "Choose another port, or 0 for any free one."
        return ListenError(f"in use by another process on {address}", field="telemetry.port", got=port, hint=hint)
    reason = os.strerror(number) if number is not None and number > 0 else str(error)
    return ListenError(f"cannot listen on port {port} there: {reason}", field="telemetry.address", got=address)


def _tls_context(section: TelemetrySection) -> ssl.SSLContext | None:
    certificate, key, client_ca = section.tls_certificate, section.tls_key, section.tls_client_ca
    if certificate is None or key is None:
        return None
    _read_file("telemetry.tls_certificate", certificate)
    _read_file("telemetry.tls_key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (ssl.SSLError, ValueError) as error:
        problem = f"cannot be used with the certificate {certificate}: {openssl_reason(error)}"
        hint = "Give the PEM files of a certificate and of its own key, without a password."
        raise InputError(problem, field="telemetry.tls_key", got=key, hint=hint) from error
    if client_ca is not None:
        _read_file("telemetry.tls_client_ca", client_ca)
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            hint = "Give the PEM file of the authority that signed the scraper's certificate."
            problem = openssl_reason(error)
            raise InputError(problem, field="telemetry.tls_client_ca", got=client_ca, hint=hint) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _read_token(file: str | None) -> bytes | None:
    if file is None:
        return None
    token = _read_file("telemetry.bearer_token_file", file).strip()
    if not token or b"\n" in token:
        raise InputError("must contain one token on one line", field="telemetry.bearer_token_file", got=file)
    return token


def _read_file(field: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        hint = "Give the path of a readable file."
        raise InputError(f"{error.strerror}", field=field, got=file, hint=hint) from error


def _refuse_password() -> str:
    """Keep OpenSSL from asking for a password at the terminal."""
    raise ValueError("the key is protected by a password")
