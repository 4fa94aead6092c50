"""The small key-value store that all ranks of a run reach, as both engines use it.

The store of `server` as a rank of another process uses it, and one for a process alone.

Serves a store over TCP: one JSON object a line, asked and answered.

    {"set": KEY, "value": TEXT}             -> {}
    {"get": [KEY, ...], "seconds": NUMBER}  -> {"values": [TEXT, ...]}, or {"missing": [KEY, ...]} after that time
    {"check": KEY}                          -> {"found": BOOL}
    {"add": KEY, "amount": NUMBER}          -> {"sum": NUMBER}

Who connects is told first which store this is, {"store": NAME}: one that is started again is another. It lives in a
process that outlives every rank, so that what a lost rank said last can still be read.
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
from typing import Any, Protocol

FAILED_KEY = "pulse/failed"
"""Key: which rank was the first to fail by itself, by its own word or that of the process that started it."""


class StoreError(Exception):
    """The store cannot be reached (any more)."""


class StoreTimeout(StoreError):
    """What was waited for did not come in time."""


class Store(Protocol):
    """Texts by their names, the same for every rank.

    It is that of `server`, or torchrun's where that has started the ranks (pytorch.meeting). Every call raises
    StoreError where the store is gone, after the store's patience at the latest.
    """

    def set(self, key: str, value: str) -> None:
        """Writes a value, over an older one."""

    def get(self, keys: Sequence[str]) -> list[str]:
        """The values of the keys, each as soon as there is one; StoreTimeout after the store's patience."""

    def wait(self, keys: Sequence[str], seconds: float) -> None:
        """Returns when every key has a value; StoreTimeout after `seconds`."""

    def has(self, key: str) -> bool:
        """Whether the key has a value."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which begins at 0; its new value. A counter is no key of the other calls."""

    def clone(self, timeout_seconds: float) -> "Store":
        """The same store for another thread, with `seconds` of patience."""


RETRY_SECONDS = 0.2
CONNECT_SECONDS = 5.0
"""Of one attempt: a pod that was replaced may leave an address at which nobody answers, and another one in DNS."""
GRACE_SECONDS = 5.0
"""Longer than it was asked to wait the server has for its answer."""


class StoreClient:
    """A connection to the server at `address`:`port`, made at the first question.

    timeout_seconds: the patience of its calls. A server that is not there yet is looked for again for as long; one that
    was there and is no more is gone, even where another has taken its place: it would be told of a world that it knows
    nothing of. Connections are not shared between threads: see `own`.
    """

    def __init__(self, address: str, port: int, timeout_seconds: float, known: set[str] | None = None) -> None:
        """known: the name of the store, once it was met; all that `own` has made know it, too."""
        self._address, self._port, self._timeout_seconds = address, port, timeout_seconds
        self._known = set() if known is None else known
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._buffer = b""
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
        """Lets the server know that nothing more is asked."""
        if self._socket is not None:
            self._socket.close()

    def _get(self, keys: Sequence[str], seconds: float) -> list[str]:
        answer = self._request({"get": list(keys), "seconds": seconds}, seconds)
        if "missing" in answer:
            raise StoreTimeout(f"timed out after {seconds:g} s without {', '.join(answer['missing'])}")
        return [str(value) for value in answer["values"]]

    def _request(self, question: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        """seconds: that the server is asked to wait."""
        with self._lock:
            if self._lost_reason:
                raise StoreError(self._lost_reason)
            try:
                line = self._exchange(json.dumps(question).encode() + b"\n", seconds)
                answer: dict[str, Any] = json.loads(line)
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
            ) as error:  # from here on question and answer would not match
                self._lost_reason = (
                    f"the store at {self._address}:{self._port} does not answer ({error or 'it has ended'})"
                )
                self.close()
                raise StoreError(self._lost_reason) from error
            return answer

    def _exchange(self, line: bytes, seconds: float) -> bytes:
        if self._socket is None:
            self._socket = self._connect()
            self._socket.settimeout(self._timeout_seconds + GRACE_SECONDS)
            self._known.add(json.loads(self._receive(self._socket))["store"])
            if len(self._known) > 1:
                raise ConnectionError("another one has taken its place")
        self._socket.settimeout(max(self._timeout_seconds, seconds) + GRACE_SECONDS)
        self._socket.sendall(line)
        return self._receive(self._socket)

    def _receive(self, connection: socket.socket) -> bytes:
        """The next line."""
        while b"\n" not in self._buffer:
            received = connection.recv(2**16)
            if not received:
                raise ConnectionError("it has ended")
            self._buffer += received
        answer, _, self._buffer = self._buffer.partition(b"\n")
        return answer

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


class LocalStore:
    """For a process that has nobody to meet: nothing that is not there yet will ever come."""

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
            raise StoreTimeout(f"nobody else is here to bring {', '.join(missing)}")

    def has(self, key: str) -> bool:
        return key in self._values

    def add(self, key: str, amount: int) -> int:
        self._sums[key] += amount
        return self._sums[key]

    def clone(self, timeout_seconds: float) -> "LocalStore":
        return self


MAX_LINE_BYTES = 2**24
"""Of one line."""
LINGER_SECONDS = 5.0


class StoreServer:
    """Listens on `address`:`port` (0: a free one, see `port`) from a thread of its own. Raises OSError if it cannot."""

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
        """Returns when every client has gone, or after `seconds`: ranks of other pods may have one more question."""
        deadline = time.monotonic() + seconds
        while self._clients and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """Listens no more."""
        self._loop.call_soon_threadsafe(self._server.close)
        while self._server.is_serving():
            time.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients += 1
        with suppress(ConnectionError, ValueError):  # the client is gone, or is none of ours
            writer.write(json.dumps({"store": self._name}).encode() + b"\n")
            while line := await reader.readline():
                writer.write(json.dumps(await self._answer(json.loads(line))).encode() + b"\n")
                await writer.drain()
        self._clients -= 1
        writer.close()

    async def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        match asked:
            case {"set": key, "value": value}:
                self._values[key] = value
                if arrival := self._key_events.pop(key, None):
                    arrival.set()
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
        raise ValueError(f"not a question of ours: {asked}")
