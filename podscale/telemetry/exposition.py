"""Metrics from many ranks to one endpoint.

Each rank leaves its exposition text in a pod-local file, at most once a second and from a thread of its own; the
supervisor merges the files when it is scraped. A slow or hostile scraper therefore never touches a rank.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

SNAPSHOT_SECONDS = 1.0

disable_created_metrics()  # type: ignore[no-untyped-call]


def snapshot_path(directory: Path, rank: int) -> Path:
    return directory / f"metrics-{rank}.prom"


class SnapshotWriter:
    """Writes `registry` to `path` once a second until closed, and a last time then; use as a context manager."""

    def __init__(self, registry: CollectorRegistry, path: Path, interval: float = SNAPSHOT_SECONDS) -> None:
        self._registry = registry
        self._path = path
        self._interval = interval
        self._closed = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, name="metrics-snapshot", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leaves the final values behind; safe to call twice."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> "SnapshotWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            self._write()
        self._write()

    def _write(self) -> None:
        # Renamed so that a reader never sees half; not synced, since nobody needs it after the pod.
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_bytes(generate_latest(self._registry))
            temporary.replace(self._path)
        except OSError:
            return  # a full scratch disk costs metrics, not the training


def merge_expositions(texts: Iterable[str]) -> str:
    """One exposition of several: one HELP and one TYPE per family, samples in the order of `texts`.

    The texts come from `generate_latest`, where each family is one block that begins with its HELP line.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for text in texts:
        head: list[str] = []
        samples: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                head, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
            target = head if line.startswith("#") else samples
            if target is samples or line not in head:
                target.append(line)
    return "".join(f"{line}\n" for head, samples in families.values() for line in (*head, *samples))


class MergedMetrics:
    """Renders the supervisor's own registry and all ranks' snapshots under `directory`, at most once a second.

    directory: None where there are no ranks.
    """

    def __init__(
        self,
        directory: Path | None,
        registry: CollectorRegistry,
        interval: float = SNAPSHOT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._registry = registry
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._rendered = b""
        self._due = float("-inf")

    def __call__(self) -> bytes:
        with self._lock:
            if self._clock() >= self._due:
                self._rendered = merge_expositions(self._texts()).encode()
                self._due = self._clock() + self._interval
            return self._rendered

    def refresh(self) -> None:
        """Makes the next call render anew: for the final values of a run."""
        with self._lock:
            self._due = float("-inf")

    def _texts(self) -> Iterable[str]:
        yield generate_latest(self._registry).decode()
        paths = self._directory.glob("metrics-*.prom") if self._directory is not None else ()
        for path in sorted(paths, key=lambda path: int(path.stem.partition("-")[2])):
            with suppress(FileNotFoundError):  # the ranks are being started again
                yield path.read_text(encoding="utf-8")
