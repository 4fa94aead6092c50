"""Registry of metric values, snapshots of each rank, and their merge into one exposition.

Counting code writes plain numbers, in less than a microsecond. Metric families are created when they are collected, on
another thread.

Each rank writes its exposition to a pod-local file once a second. The supervisor merges the files at a scrape, so that
a slow or hostile scraper cannot slow a rank.
"""

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, product
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from podscale.telemetry.catalogue import CATALOGUE
from podscale.util.formatting import printable

MAX_LABEL_LENGTH = 120
"""Maximal length of a label's value, characters; longer values are truncated and end in an ellipsis."""
SNAPSHOT_SECONDS = 1.0

Labels = tuple[str, ...]
MetricSample = tuple[str, Labels, float]
"""Metric name in the catalogue, values of its own labels, and the number."""

disable_created_metrics()  # type: ignore[no-untyped-call]


class SampleSource(Protocol):
    """Object with metrics to export."""

    def samples(self) -> Iterable[MetricSample]:
        """Return the current samples; called on the collecting thread."""
        ...


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def sample(self) -> tuple[list[tuple[str, int]], float]:
        """Return the number of values up to each bound, as text, and the sum of all values."""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(list(self._counts)), strict=True)), self._sum


class MetricRegistry(Collector):
    """Values of metrics with the same common labels, such as run and rank; register it with a CollectorRegistry.

    Names are those of the catalogue; labels are the values of the metric's own labels, in its order. Each number has
    one writer; any thread may read it.
    """

    def __init__(self, **common: str) -> None:
        self._common = {name: sanitize_label(value) for name, value in common.items()}
        self._values: dict[str, dict[Labels, float]] = {}
        self._summaries: dict[str, dict[Labels, tuple[int, float]]] = {}
        self._infos: dict[str, dict[str, str]] = {}
        self._histograms: dict[str, Histogram] = {}
        self._callbacks: list[Callable[[], None]] = []

    def declare(self, *names: str) -> None:
        """Set counters and summaries to 0 for every combination of label values in the catalogue."""
        for name in names:
            labels = list(product(*self._own_labels(name).values()))
            if CATALOGUE[name].kind == "summary":
                self._summaries[name] = dict.fromkeys(labels, (0, 0.0))
            else:
                self._values[name] = dict.fromkeys(labels, 0.0)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a number, also of a counter."""
        assert len(labels) == len(self._own_labels(name)), (name, labels)
        self._values.setdefault(name, {})[tuple(map(sanitize_label, labels))] = float(value)

    def add(self, name: str, value: float = 1.0, *labels: str) -> None:
        self.set(name, self.get(name, *labels) + value, *labels)

    def get(self, name: str, *labels: str) -> float:
        """Return a number; 0 if it was never set."""
        return self._values.get(name, {}).get(tuple(map(sanitize_label, labels)), 0.0)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add one event to a summary."""
        count, total = self._summaries[name][labels]
        self._summaries[name][labels] = (count + 1, total + value)

    def histogram(self, name: str, bounds: Sequence[float]) -> Histogram:
        """Return the new histogram of a metric without labels of its own, which is exported from 0 on."""
        assert not self._own_labels(name), name
        self._histograms[name] = Histogram(bounds)
        return self._histograms[name]

    def set_info(self, name: str, labels: Mapping[str, str]) -> None:
        self._infos[name] = {key: sanitize_label(value) for key, value in labels.items()}

    def on_collect(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the start of each collection."""
        self._callbacks.append(callback)

    def add_source(self, source: SampleSource) -> None:
        """Set the samples of `source` at the start of each collection."""

        def set_samples() -> None:
            for name, labels, value in source.samples():
                self.set(name, value, *labels)

        self.on_collect(set_samples)

    def collect(self) -> Iterator[Metric]:
        for callback in list(self._callbacks):
            callback()
        common = [*self._common.values()]
        for name, values in list(self._values.items()):
            family: Any = CATALOGUE[name].family()
            for labels, value in list(values.items()):
                family.add_metric([*common, *labels], value)
            yield family
        for name, summaries in list(self._summaries.items()):
            family = CATALOGUE[name].family()
            for labels, (count, total) in list(summaries.items()):
                family.add_metric([*common, *labels], count, total)
            yield family
        for name, info in list(self._infos.items()):
            yield CATALOGUE[name].info({**self._common, **info})
        for name, histogram in list(self._histograms.items()):
            family = CATALOGUE[name].family()
            family.add_metric(common, *histogram.sample())
            yield family

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration does not collect."""
        return []

    def _own_labels(self, name: str) -> Mapping[str, tuple[str, ...]]:
        entry = CATALOGUE[name]
        assert entry.labels[: len(self._common)] == tuple(self._common), f"{name} has other common labels"
        return entry.own_labels


class SnapshotWriter:
    """Writer of `registry` to `path` at the start, once a second, and when closed; a context manager."""

    def __init__(self, registry: CollectorRegistry, path: Path, interval: float = SNAPSHOT_SECONDS) -> None:
        self._registry, self._path, self._interval = registry, path, interval
        self._closed = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, name="metrics-snapshot", daemon=True)
        self._thread.start()

    def close(self) -> None:
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
        # Atomic for readers; not synced, because nothing reads the file after the pod.
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_bytes(generate_latest(self._registry))
            temporary.replace(self._path)
        except OSError:
            return  # a full scratch disk loses metrics but does not stop the training


class MergedMetrics:
    """Exposition of the supervisor's registry and all ranks' snapshots, rendered at most once per interval.

    Args:
        directory: Directory of the snapshots; None without ranks.
        interval: Seconds.
    """

    def __init__(
        self,
        directory: Path | None,
        registry: CollectorRegistry,
        interval: float = SNAPSHOT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._registry, self._interval, self._clock = directory, registry, interval, clock
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
        """Discard the rendered text, so that the next call returns the current values."""
        with self._lock:
            self._due = float("-inf")

    def _texts(self) -> Iterable[str]:
        yield generate_latest(self._registry).decode()
        paths = self._directory.glob("metrics-*.prom") if self._directory is not None else ()
        for path in sorted(paths, key=lambda path: int(path.stem.partition("-")[2])):
            with suppress(FileNotFoundError):  # the ranks are restarting
                yield path.read_text(encoding="utf-8")


def snapshot_path(directory: Path, rank: int) -> Path:
    return directory / f"metrics-{rank}.prom"


def merge_expositions(texts: Iterable[str]) -> str:
    """Merge expositions of `generate_latest`: one HELP and one TYPE per family, samples in the order of `texts`."""
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


def sanitize_label(value: str) -> str:
    """Return the value as printable text of at most MAX_LABEL_LENGTH characters."""
    text = printable(value)
    return text if len(text) <= MAX_LABEL_LENGTH else f"{text[: MAX_LABEL_LENGTH - 3]}..."


def series_values(text: str) -> dict[str, float | None]:
    """Return every sample by its PromQL series, without histogram buckets; None for NaN and infinity."""
    return {
        _series_name(sample.name, sample.labels): sample.value if math.isfinite(sample.value) else None
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def _series_name(name: str, labels: dict[str, str]) -> str:
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    matchers = ",".join(f'{key}="{value.translate(escapes)}"' for key, value in labels.items())
    return f"{name}{{{matchers}}}" if matchers else name
