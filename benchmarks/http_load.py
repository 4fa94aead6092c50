"""Load on a prediction server: clients that post images one after the other, beside bad input and silent clients.

It needs only Python, so that a test can run its text in a pod:

    python3 -c "$(cat benchmarks/http_load.py)" URL IMAGE... --clients 8 --seconds 10

Prints one JSON object: answered images and their rate, latencies in milliseconds, and the count of each code.
"""

import argparse
import http.client
import json
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 60.0
JPEG = {"Content-Type": "image/jpeg"}
GARBAGE = b"no image " * 100


class Load:
    """Threads that send requests until a time, and what they got."""

    def __init__(self, url: str, images: list[bytes], seconds: float, *, keep_alive: bool) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = str(parts.hostname), parts.port or 80, parts.path or "/"
        self._images, self._end, self._keep_alive = images, time.monotonic() + seconds, keep_alive
        self._lock = threading.Lock()
        self.codes: Counter[str] = Counter()
        self.latencies: list[float] = []

    def post_images(self, first: int) -> None:
        """Post the images in turn, from number `first` on."""
        connection, number = self._connect(), first
        while time.monotonic() < self._end:
            started = time.monotonic()
            code = self._post(connection, self._images[number % len(self._images)])
            self._count(code, time.monotonic() - started)
            if not self._keep_alive or not code.isdecimal():
                connection.close()  # the next request opens it again
            number += 1
        connection.close()

    def post_garbage(self) -> None:
        """Post bytes that are no image, ten times a second."""
        while time.monotonic() < self._end:
            connection = self._connect()
            self._count(f"bad {self._post(connection, GARBAGE)}")
            connection.close()
            time.sleep(0.1)

    def stay_silent(self) -> None:
        """Open connections that send half of a header, and open them again when the server closes them."""
        while time.monotonic() < self._end:
            with socket.create_connection((self._host, self._port), timeout=TIMEOUT_SECONDS) as connection:
                connection.sendall(b"POST /predict HTTP/1.1\r\nX-Slow: ")
                connection.settimeout(max(0.01, self._end - time.monotonic()))
                try:
                    connection.recv(1)
                except OSError:
                    continue

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_SECONDS)

    def _post(self, connection: http.client.HTTPConnection, body: bytes) -> str:
        """Return the code of the answer, or the name of the error."""
        try:
            connection.request("POST", self._path, body, JPEG)
            response = connection.getresponse()
            response.read()
            return str(response.status)
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__

    def _count(self, code: str, seconds: float | None = None) -> None:
        with self._lock:
            self.codes[code] += 1
            if seconds is not None and code == "200":
                self.latencies.append(seconds)


def percentile(values: list[float], part: float) -> float | None:
    """Return the nearest-rank percentile, milliseconds; None without values."""
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))], 2) if ordered else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--bad", type=int, default=0, help="clients that post no images")
    parser.add_argument("--silent", type=int, default=0, help="clients that never finish their headers")
    parser.add_argument("--new-connections", action="store_true", help="open a connection for each request")
    options = parser.parse_args()
    images = [path.read_bytes() for path in options.images]
    load = Load(options.url, images, options.seconds, keep_alive=not options.new_connections)
    started = time.monotonic()
    threads = [threading.Thread(target=load.post_images, args=(number,)) for number in range(options.clients)]
    threads += [threading.Thread(target=load.post_garbage) for _ in range(options.bad)]
    threads += [threading.Thread(target=load.stay_silent) for _ in range(options.silent)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started
    answered = len(load.latencies)
    json.dump(
        {
            "images": answered,
            "rate": round(answered / seconds, 2),
            "p50_ms": percentile(load.latencies, 0.5),
            "p99_ms": percentile(load.latencies, 0.99),
            "codes": dict(sorted(load.codes.items())),
        },
        sys.stdout,
    )
    print()


if __name__ == "__main__":
    main()
