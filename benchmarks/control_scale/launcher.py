"""Launcher of one run in a process that counts what it sends and receives.

    python -m benchmarks.control_scale.launcher DOCUMENT

It runs `podscale.kubernetes.run_stage.run_stage`, as `podscale submit` and the pipeline's launcher do. For each line of
its input it prints a line of JSON with the totals so far.
"""

import http.client
import json
import ssl
import sys
import threading
from typing import Any

from benchmarks.measure import cpu_seconds, resident_bytes
from podscale.config.document import load
from podscale.kubernetes.informer import Informer
from podscale.kubernetes.resources import KubernetesObject
from podscale.kubernetes.run_stage import run_stage

totals = {"requests": 0, "objects": 0, "bytes": 0}


def count_requests() -> None:
    """Count the HTTP requests and the bytes of all answers, after TLS."""
    put, receive = http.client.HTTPConnection.putrequest, ssl.SSLSocket.recv_into

    def counted_put(self: http.client.HTTPConnection, *arguments: Any, **options: Any) -> None:
        totals["requests"] += 1
        put(self, *arguments, **options)

    def counted_receive(self: ssl.SSLSocket, *arguments: Any, **options: Any) -> int:
        received = receive(self, *arguments, **options)
        totals["bytes"] += received
        return received

    http.client.HTTPConnection.putrequest = counted_put  # type: ignore[method-assign]
    ssl.SSLSocket.recv_into = counted_receive  # type: ignore[method-assign]


def count_objects() -> None:
    """Count the objects of lists and of watches, without bookmarks."""
    listed, changed = Informer._list, Informer._apply_change

    def counted_list(self: Informer) -> str:
        version = listed(self)
        totals["objects"] += len(self.objects())
        return version

    def counted_change(self: Informer, change: KubernetesObject) -> str:
        totals["objects"] += change["type"] != "BOOKMARK"
        return changed(self, change)

    Informer._list, Informer._apply_change = counted_list, counted_change  # type: ignore[method-assign]


def main() -> None:
    count_requests()
    count_objects()
    options = {"out": sys.stderr}
    waiting = threading.Thread(target=run_stage, args=(load(sys.argv[1]), "train"), kwargs=options, daemon=True)
    waiting.start()
    while sys.stdin.readline():
        state = {"mib": resident_bytes() / 2**20, "cpu": cpu_seconds(), "waiting": waiting.is_alive()}
        print(json.dumps({**totals, **state}), flush=True)


if __name__ == "__main__":
    main()
