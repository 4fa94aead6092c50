"""Serves a store over TCP: one JSON object a line, asked and answered.

    {"set": KEY, "value": TEXT}             -> {}
    {"get": [KEY, ...], "seconds": NUMBER}  -> {"values": [TEXT, ...]}, or {"missing": [KEY, ...]} after that time
    {"check": KEY}                          -> {"found": BOOL}
    {"add": KEY, "amount": NUMBER}          -> {"sum": NUMBER}

Who connects is told first which store this is, {"store": NAME}: one that is started again is another. It lives in a
process that outlives every rank, so that what a lost rank said last can still be read.
"""

import asyncio
import json
import threading
import time
import uuid
from collections import defaultdict
from contextlib import suppress
from typing import Any

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
