"""HTTP server of /metrics that a stuck or hostile client cannot block, with TLS, client certificates and a token.

prometheus_client's own server has no timeout and no connection limit (800 idle sockets hold 802 threads forever), and
with TLS one silent client blocks all others. This server reads a small request within a total time, answers with
rendered bytes, and closes. The TLS handshake runs on the connection's own thread. If too many connections are open, the
oldest is closed: a scrape takes milliseconds, so it is never a scraper's.
"""

import errno
import hmac
import os
import socket
import socketserver
import ssl
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


@dataclass(frozen=True)
class EndpointAuth:
    """tls: what a connection must speak, with client certificates where the context asks for them; token: what every
    request must bear. None: open."""

    tls: ssl.SSLContext | None = None
    token: bytes | None = None

    def is_authorized(self, headers: Iterable[bytes]) -> bool:
        """Whether a request with these header lines bears the token; compared in constant time."""
        if self.token is None:
            return True
        for header in headers:
            name, _, value = header.partition(b":")
            kind, _, given = value.strip().partition(b" ")
            if name.lower() == b"authorization" and kind.lower() == b"bearer":
                return hmac.compare_digest(given.strip(), self.token)
        return False


NO_AUTH = EndpointAuth()


def read_endpoint_auth(section: TelemetrySection) -> EndpointAuth:
    """As the document says, which is read once: the files of a stage that runs may change unnoticed.

    Raises InputError where a file is missing, empty or not what it should be.
    """
    return EndpointAuth(_tls(section), _token(section.bearer_token_file))


def _tls(section: TelemetrySection) -> ssl.SSLContext | None:
    if section.tls_certificate is None or section.tls_key is None:
        return None
    _read_file("telemetry.tls_certificate", section.tls_certificate)
    _read_file("telemetry.tls_key", section.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(section.tls_certificate, section.tls_key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise InputError(
            f"cannot be used with the certificate {section.tls_certificate}: {_openssl_reason(error)}",
            field="telemetry.tls_key",
            got=section.tls_key,
            hint="Give the PEM files of a certificate and of its own key, without a password.",
        ) from error
    if section.tls_client_ca is not None:
        _read_file("telemetry.tls_client_ca", section.tls_client_ca)
        try:
            context.load_verify_locations(section.tls_client_ca)
        except ssl.SSLError as error:
            raise InputError(
                _openssl_reason(error),
                field="telemetry.tls_client_ca",
                got=section.tls_client_ca,
                hint="Give the PEM file of the authority that signed the scraper's certificate.",
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _token(file: str | None) -> bytes | None:
    if file is None:
        return None
    token = _read_file("telemetry.bearer_token_file", file).strip()
    if not token or b"\n" in token:
        raise InputError("must hold one token, on one line", field="telemetry.bearer_token_file", got=file)
    return token


def _read_file(option: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InputError(
            f"{error.strerror}", field=option, got=file, hint="Give the path of a file that can be read."
        ) from error


def _openssl_reason(error: Exception) -> str:
    """OpenSSL's words, where it has any."""
    reason = getattr(error, "reason", None) or str(error)
    return str(reason).replace("_", " ").lower()


def _no_password() -> str:
    """OpenSSL would ask for one at the terminal."""
    raise ValueError("the key is protected by a password")


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 8192
REQUEST_SECONDS = 5.0
EVICTION_SECONDS = 2.0
"""A connection that was closed has ended its thread long before."""


class ListenError(InputError):
    """The address of the metrics cannot be listened on."""


class MetricsServer:
    """Serves `render()` at http(s)://address:port/metrics from its own threads, from `start` until `close`.

    Listening begins with the constructor, so that a taken port is known before anything is started; port 0 takes a
    free one (`port` says which). Raises CannotListen where the address cannot be listened on.
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
            raise _listen_error_message(address, port, error) from error
        self.address = address
        self.port: int = self._server.server_address[1]
        self._scheme = "https" if auth.tls is not None else "http"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._started = False

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self._scheme}://{host}:{self.port}/metrics"

    @property
    def scrapes(self) -> int:
        """Scrapes answered so far."""
        return self._server.scrapes

    @property
    def shed_connections(self) -> int:
        """Connections closed unanswered so far, because too many were open."""
        return self._server.shed_connections

    def start(self) -> "MetricsServer":
        self._started = True
        self._thread.start()
        return self

    def wait_for_scrape(self, seconds: float, interrupted: Callable[[], bool] = lambda: False) -> bool:
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
        """On the accepting thread: finds room, for which the oldest connection may have to go."""
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
        """The connection under TLS, within the time of a request; on its own thread."""
        with self._lock:  # the old object lets go of the connection: from here the new one is what can be evicted
            secured = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            if id(request) in self._open:
                self._open[id(request)] = secured
        secured.settimeout(self.request_seconds)
        secured.do_handshake()
        return secured

    def count_scrape(self) -> None:
        """A scraper has its answer."""
        with self._lock:
            self.scrapes += 1
        self.scraped.set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up or send nonsense are no news."""

    def _evict(self) -> None:
        """Hangs up on the oldest connection, which ends its thread."""
        with self._lock, suppress(OSError):
            if self._open:
                _, oldest = self._open.popitem(last=False)
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)  # not SSL's own, which the other thread is using

    def _release(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        self._free.release()


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        tls = self.server.auth.tls
        if tls is None:
            self._handle(self.request)
            return
        with self.server.wrap_tls(self.request, tls) as connection:
            self._handle(connection)

    def _handle(self, connection: socket.socket) -> None:
        request = self._request(connection).split(b"\n")
        words = request[0].decode("latin-1").strip().split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            self._answer(connection, "400 Bad Request", b"")
        elif words[1].partition("?")[0] != "/metrics":
            self._answer(connection, "404 Not Found", b"only /metrics is here\n")
        elif words[0] not in ("GET", "HEAD"):
            self._answer(connection, "405 Method Not Allowed", b"")
        elif not self.server.auth.is_authorized(request[1:]):
            self._answer(connection, "401 Unauthorized", b"", "WWW-Authenticate: Bearer\r\n")
        else:
            self._answer(connection, "200 OK", self.server.render(), head_only=words[0] == "HEAD")
            self.server.count_scrape()

    def _request(self, connection: socket.socket) -> bytes:
        """Reads to the end of the headers within the time for the whole request."""
        deadline = time.monotonic() + self.server.request_seconds
        received = b""
        while b"\r\n\r\n" not in received and b"\n\n" not in received:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(4096)
            received += part
            if not part or len(received) > MAX_REQUEST_BYTES:
                raise ConnectionError("no request")
        return received

    def _answer(
        self, connection: socket.socket, status: str, body: bytes, more: str = "", *, head_only: bool = False
    ) -> None:
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
            f"{more}Connection: close\r\n\r\n"
        )
        connection.settimeout(self.server.request_seconds)  # sendall: a limit for the whole of it
        connection.sendall(head.encode() + (b"" if head_only else body))


def _listen_error_message(address: str, port: int, error: Exception) -> ListenError:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return ListenError(
            f"in use by another process on {address}",
            field="telemetry.port",
            got=port,
            hint="Choose another port, or 0 for any free one.",
        )
    reason = os.strerror(number) if number is not None and number > 0 else str(error)
    return ListenError(f"cannot listen on port {port} there: {reason}", field="telemetry.address", got=address)
