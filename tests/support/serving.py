"""Real servers of `podscale serve`, and requests to them."""

import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.commands import Command
from tests.support.exposition import families, scrape

JPEG = {"Content-Type": "image/jpeg"}
ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def row(self) -> dict[str, Any]:
        """Prediction of the only image."""
        (row,) = self.json["predictions"]
        return dict(row)


@dataclass(frozen=True)
class Server:
    """Running server: its process and its port on this machine."""

    command: Command
    port: int

    def request(
        self, method: str, path: str, body: bytes | Iterator[bytes] = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, body or None, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def predict(self, image: bytes, query: str = "") -> Answer:
        return self.request("POST", f"/predict{query}", image, JPEG)

    def predict_files(self, files: Sequence[tuple[str, bytes]], query: str = "") -> Answer:
        """Send a form with these names and files."""
        parts = (
            f'--limit\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n\r\n'.encode() + data
            for name, data in files
        )
        body = b"".join(part + b"\r\n" for part in parts) + b"--limit--\r\n"
        return self.request("POST", f"/predict{query}", body, {"Content-Type": "multipart/form-data; boundary=limit"})

    def status(self, path: str) -> int:
        """Return the code of a GET; 0 if no process listens."""
        try:
            return self.request("GET", path).status
        except OSError:
            return 0

    def metrics(self) -> str:
        return scrape(f"http://127.0.0.1:{self.port}/metrics")

    def value(self, series: str, **labels: str) -> float:
        """Return the sum of the samples with these labels."""
        return sum(
            sample.value
            for family in families(self.metrics())
            for sample in family.samples
            if sample.name == f"podscale_serve_{series}" and labels.items() <= sample.labels.items()
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_SECONDS)


@contextmanager
def running_server(run: Path, folder: Path, *options: str) -> Iterator[Server]:
    """Start a server on a free port, with its output in `folder`, and wait until it is ready."""
    command = Command(folder, "serve", str(run), "--port", "0", *options, output=folder)
    try:
        command.wait_for(lambda: listening_port(folder))
        server = Server(command, listening_port(folder))
        command.wait_for(lambda: server.status("/healthz") == 200)
        yield server
    finally:
        command.kill()


def listening_port(folder: Path) -> int:
    """Return the port that a server has printed; 0 until then."""
    found = re.search(r" at http://\S+:(\d+)/predict\n", (folder / "err").read_text())
    return int(found[1]) if found else 0


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that begin together, in threads."""
    barrier = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        barrier.wait()
        results[number] = calls[number]()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
