"""Key-value store of a run's ranks: server, client, and a local store for a single process.

The launcher runs the server, so the store outlives every rank, and the last heartbeat of a lost rank can still be read.
torch's TCPStore would bring torch into the launcher and the JAX engine, whose images do not have it. The protocol is
JSON over TCP, one object a line for each request and response:

    {"set": KEY, "value": TEXT}             -> {}
    {"get": [KEY, ...], "seconds": NUMBER}  -> {"values": [TEXT, ...]}, or {"missing": [KEY, ...]} after that time
    {"check": KEY}                          -> {"found": BOOL}
    {"add": KEY, "amount": NUMBER}          -> {"sum": NUMBER}

The server first sends {"store": NAME} to each client. A restarted server has another name.
"""

import asyncio
import json
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedReader
from typing import Any, Protocol

FAILED_KEY = "pulse/failed"
"""Key of the first rank that failed by itself; that rank or its launcher writes it."""

RETRY_SECONDS = 0.2
CONNECT_SECONDS = 5.0
"""Timeout of one connection attempt, seconds: DNS may still return the address of a pod that was replaced."""
GRACE_SECONDS = 5.0
"""Time that the client allows beyond the wait it asked the server for, seconds."""
MAX_LINE_BYTES = 2**24
LINGER_SECONDS = 5.0
"""Time that the server waits for its clients to disconnect, seconds."""


class StoreError(Exception):
    """The store cannot be reached."""


class StoreTimeout(StoreError):
    """A key was not set in time."""


class Store(Protocol):
    """Key-value store shared by all ranks: this module's, or torchrun's if torchrun started the ranks.

    Every call raises StoreError if the store is gone, after the store's timeout at the latest.
    """

    def set(self, key: str, value: str) -> None:
        """Set a value; replaces an older one."""

    def get(self, keys: Sequence[str]) -> list[str]:
        """Wait for all keys and return their values. Raises StoreTimeout after the store's timeout."""

    def wait(self, keys: Sequence[str], seconds: float) -> None:
        """Wait until every key has a value. Raises StoreTimeout after `seconds`."""

    def has(self, key: str) -> bool:
        """Return True if the key has a value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0, and return its new value. Counters and keys are separate."""

    def clone(self, timeout_seconds: float) -> "Store":
        """Return the same store for another thread, with its own timeout in seconds."""


class StoreClient:
    """Connection to a StoreServer, opened at the first request; one per thread (see `clone`).

    A server that does not answer yet is retried until the timeout. After a lost connection the client does not
    connect again: a restarted server at the same address has lost the keys of this run. The clones share `known`, the
    name of the store once it was reached.
    """

    def __init__(self, address: str, port: int, timeout_seconds: float, known: set[str] | None = None) -> None:
        self._address, self._port, self._timeout_seconds = address, port, timeout_seconds
        self._known = set() if known is None else known
        self._socket: socket.socket | None = None
        self._reader: BufferedReader | None = None
        self._lock = threading.Lock()
        self._lost_reason = ""

    def set(self, key: str, value: str) -> None:
        self._request({"set": key, "value": value})

    def get(self, keys: Sequence[str]) -> list[str]:
        return self._get(keys, self._timeout_seconds)

    def wait(self, keys: Sequence[str], seconds: float) -> None:
        self._get(keys, seconds)

    def has(self, key: str) -> bool:
        return bool(self._request({"check": key})["found"])

    def add(self, key: str, amount: int) -> int:
        return int(self._request({"add": key, "amount": amount})["sum"])

    def clone(self, timeout_seconds: float) -> "StoreClient":
        return StoreClient(self._address, self._port, timeout_seconds, self._known)

    def close(self) -> None:
        for opened in (self._reader, self._socket):
            if opened is not None:
                opened.close()

    def _get(self, keys: Sequence[str], seconds: float) -> list[str]:
        response = self._request({"get": list(keys), "seconds": seconds}, seconds)
        if "missing" in response:
            raise StoreTimeout(f"timed out after {seconds:g} s without {', '.join(response['missing'])}")
        return [str(value) for value in response["values"]]

    def _request(self, request: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        """Send a request and return the response; `seconds` is the wait that the server was asked for."""
        with self._lock:
            if self._lost_reason:
                raise StoreError(self._lost_reason)
            try:
                return self._exchange(json.dumps(request).encode() + b"\n", seconds)
            except (OSError, ValueError, KeyError, TypeError) as error:
                # Requests and responses of this connection no longer match: it cannot be used again.
                self._lost_reason = f"the store at {self._address}:{self._port} does not answer ({error})"
                self.close()
                raise StoreError(self._lost_reason) from error

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        if self._socket is None or self._reader is None:
            self._socket = self._connect()
            self._socket.settimeout(self._timeout_seconds + GRACE_SECONDS)
            self._reader = self._socket.makefile("rb")
            self._known.add(_read_message(self._reader)["store"])
            if len(self._known) > 1:
                raise ConnectionError("another store has replaced it")
        self._socket.settimeout(max(self._timeout_seconds, seconds) + GRACE_SECONDS)
        self._socket.sendall(line)
        return _read_message(self._reader)

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            try:
                seconds = min(CONNECT_SECONDS, max(1.0, self._timeout_seconds))
                connection = socket.create_connection((self._address, self._port), timeout=seconds)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_SECONDS)


def _read_message(reader: BufferedReader) -> dict[str, Any]:
    line = reader.readline()
    if not line:
        raise ConnectionError("it closed the connection")
    message: dict[str, Any] = json.loads(line)
    return message


class LocalStore:
    """Store of a single process: waiting for a missing key fails at once."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._sums: defaultdict[str, int] = defaultdict(int)

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, keys: Sequence[str]) -> list[str]:
        self.wait(keys, 0.0)
        return [self._values[key] for key in keys]

    def wait(self, keys: Sequence[str], seconds: float) -> None:
        if missing := [key for key in keys if key not in self._values]:
            raise StoreTimeout(f"single process: no other rank sets {', '.join(missing)}")

    def has(self, key: str) -> bool:
        return key in self._values

    def add(self, key: str, amount: int) -> int:
        self._sums[key] += amount
        return self._sums[key]

    def clone(self, timeout_seconds: float) -> "LocalStore":
        return self


class StoreServer:
    """Store server on its own thread; port 0 picks a free one (attribute `port`). Raises OSError if it is in use."""

    def __init__(self, address: str, port: int = 0) -> None:
        self._values: dict[str, str] = {}
        self._sums: defaultdict[str, int] = defaultdict(int)
        self._key_events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._clients = 0
        self._name = uuid.uuid4().hex
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, address, port, limit=MAX_LINE_BYTES, backlog=1024)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        threading.Thread(target=self._loop.run_forever, name="store", daemon=True).start()

    def wait_for_clients(self, seconds: float = LINGER_SECONDS) -> None:
        """Wait until every client has disconnected, at most `seconds`: ranks of other pods may still send a request."""
        deadline = time.monotonic() + seconds
        while self._clients and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        while self._server.is_serving():
            time.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients += 1
        with suppress(OSError, ValueError):  # the client disconnected, its host is gone, or it uses another protocol
            writer.write(json.dumps({"store": self._name}).encode() + b"\n")
            while line := await reader.readline():
                writer.write(json.dumps(await self._respond(json.loads(line))).encode() + b"\n")
                await writer.drain()
        self._clients -= 1
        writer.close()

    async def _respond(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"set": key, "value": value}:
                self._values[key] = value
                if event := self._key_events.pop(key, None):
                    event.set()
                return {}
            case {"get": keys, "seconds": seconds}:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        for key in keys:
                            if key not in self._values:
                                await self._key_events[key].wait()
                missing = [key for key in keys if key not in self._values]
                return {"missing": missing} if missing else {"values": [self._values[key] for key in keys]}
            case {"check": key}:
                return {"found": key in self._values}
            case {"add": key, "amount": amount}:
                self._sums[key] += amount
                return {"sum": self._sums[key]}
        raise ValueError(f"unknown request: {request}")
