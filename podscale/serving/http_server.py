"""uvicorn with time limits for slow clients, a limit of connections, and a stop that first drops the readiness.

uvicorn alone waits forever for the headers of a request, so a few hundred idle sockets would hold all connections, and
its `limit_concurrency` would then refuse the probes of the kubelet too. Here a connection without a complete request
is closed after a time, or if there are too many connections and it is the oldest.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from podscale.serving.app import ServerState, build_app

KEEP_ALIVE_SECONDS = 20
"""Time for which an idle connection is kept after an answer, seconds."""
SWEEP_TICKS = 5
"""Ticks of uvicorn's loop (0.1 s) between two checks for slow connections."""


class ServingConfig(uvicorn.Config):
    """Configuration of uvicorn, with the state that connections need."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        super().__init__(
            build_app(state),
            http=Connection,
            ws="none",
            lifespan="off",
            loop="asyncio",
            interface="asgi3",
            log_config=None,  # uvicorn's would close the handlers of all other libraries, and their streams
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=round(state.options.grace_seconds),
        )


class Connection(H11Protocol):
    """Connection with the time since which it waits for a request."""

    config: ServingConfig

    def connection_made(self, transport: Any) -> None:
        self.waits_since = self.loop.time()
        super().connection_made(transport)
        if len(self.connections) > self.config.state.options.max_connections:
            self._evict_oldest()

    def on_response_complete(self) -> None:
        self.waits_since = self.loop.time()
        super().on_response_complete()

    @property
    def is_between_requests(self) -> bool:
        """True until the headers of a request are complete, and again after its answer."""
        return self.cycle is None or self.cycle.response_complete

    def close_if_slow(self) -> None:
        """Close if no headers arrived in time, or the client does not read an answer. Bodies have their own limit."""
        limit = self.config.state.options.request_seconds
        if self.is_between_requests and self.loop.time() - self.waits_since > limit:
            self.abort("timeout")

    def abort(self, cause: str) -> None:
        self.config.state.metrics.count_closed_connection(cause)
        self.connections.discard(self)
        self.transport.abort()

    def _evict_oldest(self) -> None:
        """Close the connection that has been without a complete request for longest; it can be this one."""
        waiting = [one for one in self.connections if isinstance(one, Connection) and one._awaits_client]
        min(waiting, key=lambda one: one.waits_since, default=self).abort("evicted")

    @property
    def _awaits_client(self) -> bool:
        return self.is_between_requests or self.cycle.more_body


class DrainingServer(uvicorn.Server):
    """uvicorn's server of one process.

    At SIGTERM the readiness drops; after `drain_seconds` the server stops listening, answers the requests that it has
    accepted, and returns. SIGINT, or a second SIGTERM, skips the first wait.
    """

    config: ServingConfig

    def __init__(self, state: ServerState) -> None:
        super().__init__(ServingConfig(state))
        self._state, self._stop_at = state, float("inf")
        self._created = time.monotonic()
        state.metrics.watch("serve_open_connections", lambda: len(self.server_state.connections))

    async def startup(self, sockets: Any = None) -> None:
        self._state.service.start()
        await super().startup(sockets)

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        await asyncio.to_thread(self._state.service.close)

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.close_if_slow()
        if self._state.service.is_ready and not self._state.ready[self._state.process]:
            self._state.ready[self._state.process] = True
            print(f"ready after {time.monotonic() - self._created:.1f} s", file=sys.stderr, flush=True)
        if time.monotonic() >= self._stop_at or self._state.service.error is not None:
            self.should_exit = True
        return await super().on_tick(counter)

    def request_stop(self, number: int, frame: object = None) -> None:
        """Handle a signal."""
        wait = 0.0 if self._state.is_draining or number == signal.SIGINT else self._state.options.drain_seconds
        self._state.is_draining = True
        self._stop_at = time.monotonic() + wait

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT until the end. uvicorn's own would raise them again after a graceful stop."""
        before = {number: signal.signal(number, self.request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
