"""HTTP server with range requests and injected faults: cut, slow and corrupt responses."""

import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podscale.data.remote_files import ReadRetryPolicy

QUICK = ReadRetryPolicy(timeout_seconds=2.0, max_attempts=4, pause_seconds=0.01, block_bytes=16_384)


@dataclass
class Store:
    """HTTP server with range requests; `faults` is the number of faulty responses by path ending."""

    url: str
    timeout: float = QUICK.timeout_seconds
    """Of the client, seconds: what a slow answer exceeds."""
    faults: dict[tuple[str, str], int] = field(default_factory=dict)
    bytes_sent: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    """Requests by file name, also those of missing files."""
    lock: Any = field(default_factory=threading.Lock)

    def fault(self, path: str) -> str | None:
        with self.lock:
            for (kind, name), count in self.faults.items():
                if path.endswith(name) and count > 0:
                    self.faults[kind, name] = count - 1
                    return kind
        return None


@contextmanager
def serve(root: Path) -> Iterator[Store]:
    """Serve the files in a directory inside the context."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else every answer waits 40 ms for the delayed acknowledgement of its headers

        def do_GET(self) -> None:
            path = root / self.path.lstrip("/")
            with served.lock:
                served.requests[path.name] += 1
            if not path.is_file():
                self.send_error(404)
                return
            content, status = path.read_bytes(), 200
            header = self.headers.get("Range")
            fault = served.fault(self.path)
            if header and fault != "whole":
                begin, end = header.removeprefix("bytes=").split("-")
                content, status = content[int(begin) : int(end) + 1], 206
            if fault == "error":
                self.send_error(503)
                return
            if fault == "slow":
                time.sleep(served.timeout + 1)
            if fault == "corrupt":
                content = content[:-1] + bytes([content[-1] ^ 1])
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if fault == "cut":
                content = content[: len(content) // 2]
                self.close_connection = True
            with served.lock:  # before the client has all of it and asks for the count
                served.bytes_sent[path.name] += len(content)
            with suppress(BrokenPipeError):  # a client that gave up waiting
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = Store(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield served
    server.shutdown()
    server.server_close()
