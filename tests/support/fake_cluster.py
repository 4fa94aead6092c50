"""Small Kubernetes API server in this process, on a real socket: objects, watches, logs, and injected faults.

It has no controllers: tests act as the operator by changing objects. Its responses (status codes, reasons, Status
objects, the shape of watch events) are those of a kube-apiserver 1.35.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.support.fake_requests import Handler
from tests.support.fake_state import ClusterState


class FakeCluster(ClusterState):
    """Fake API server, started by `running()`. All public attributes may be changed while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0

    @contextmanager
    def running(self) -> Iterator["FakeCluster"]:
        self.up()
        try:
            yield self
        finally:
            self.down()

    def kubeconfig(self, path: Path, token: str = "good") -> Path:
        entry = {"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "me", "namespace": "train"}}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [entry],
            "contexts": [context],
            "users": [{"name": "me", "user": {"token": token}}],
            "current-context": "fake",
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def up(self) -> None:
        cluster = self

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def process_request(self, request: Any, address: Any) -> None:
                cluster._connections.add(request)
                super().process_request(request, address)

            def handle_error(self, request: Any, address: Any) -> None:
                pass  # broken connections are expected

        self._server = Server(("127.0.0.1", self._port), type("Bound", (Handler,), {"cluster": self}))
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def down(self) -> None:
        """Simulate an unreachable API server: no process listens, open connections break."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Break every open connection."""
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def forget_history(self) -> None:
        super().forget_history()
        self.cut()
