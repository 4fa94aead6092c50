"""Registry of metric values by the catalogue's names; snapshots of each rank; and their merge into one endpoint.

Counting code writes plain numbers. Metric families are created when a scraper collects, at most once a second and on
another thread, so counting takes less than a microsecond.

Each rank writes its exposition text to a pod-local file, at most once a second and on its own thread. The supervisor
merges the files when it is scraped, so a slow or hostile scraper never touches a rank.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from podscale.telemetry.catalogue import CATALOGUE
from podscale.util.formatting import printable

MAX_LABEL_LENGTH = 120
"""Characters of a label's value; what is longer ends in an ellipsis."""

Labels = tuple[str, ...]
MetricSample = tuple[str, Labels, float]
"""A name of the catalogue, the values of its own labels, and the number."""


class SampleSource(Protocol):
    """Keeps numbers for purposes of its own."""

    def samples(self) -> Iterable[MetricSample]:
        """What is exported at this moment; asked on another thread than the one that counts."""
        ...


class MetricRegistry(Collector):
    """Samples of any metrics that carry the same common labels, such as run and rank; register it with a registry.

    Names are the catalogue's, without prefix and `_total`; labels are the values of the entry's own labels in their
    order. Each number has one writer; others may read it at any time.
    """

    def __init__(self, **common: str) -> None:
        self._common = {name: sanitize_label(value) for name, value in common.items()}
        self._values: dict[str, dict[Labels, float]] = {}
        self._summaries: dict[str, dict[Labels, tuple[int, float]]] = {}
        self._infos: dict[str, dict[str, str]] = {}
        self._sources: list[Callable[[], None]] = []

    @property
    def common_label_values(self) -> list[str]:
        """The values of the common labels."""
        return [*self._common.values()]

    def declare(self, *names: str) -> None:
        """Counters and summaries at 0, a sample for every combination of the values that the catalogue lists."""
        for name in names:
            labels = list(product(*self._own_labels(name).values()))
            if CATALOGUE[name].kind == "summary":
                self._summaries[name] = dict.fromkeys(labels, (0, 0.0))
            else:
                self._values[name] = dict.fromkeys(labels, 0.0)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Replaces a number, of a counter too where it is counted elsewhere."""
        assert len(labels) == len(self._own_labels(name)), (name, labels)
        self._values.setdefault(name, {})[tuple(map(sanitize_label, labels))] = float(value)

    def add(self, name: str, value: float = 1.0, *labels: str) -> None:
        self.set(name, self.get(name, *labels) + value, *labels)

    def get(self, name: str, *labels: str) -> float:
        """A number as it is now; 0 where there is none."""
        return self._values.get(name, {}).get(tuple(map(sanitize_label, labels)), 0.0)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """One more event of a summary."""
        count, total = self._summaries[name][labels]
        self._summaries[name][labels] = (count + 1, total + value)

    def set_info(self, name: str, facts: Mapping[str, str]) -> None:
        """Sets what an info says."""
        self._infos[name] = {key: sanitize_label(value) for key, value in facts.items()}

    def on_collect(self, source: Callable[[], None]) -> None:
        """`source` is called first whenever somebody collects: for numbers that others keep and nobody hands over."""
        self._sources.append(source)

    def add_source(self, source: SampleSource) -> None:
        """The samples of `source` are taken whenever somebody collects."""

        def take() -> None:
            for name, labels, value in source.samples():
                self.set(name, value, *labels)

        self.on_collect(take)

    def collect(self) -> Iterator[Metric]:
        """The families of this moment."""
        for source in list(self._sources):
            source()
        for name, values in list(self._values.items()):
            family: Any = CATALOGUE[name].family()
            for labels, value in list(values.items()):
                family.add_metric([*self.common_label_values, *labels], value)
            yield family
        for name, summaries in list(self._summaries.items()):
            family = CATALOGUE[name].family()
            for labels, (count, total) in list(summaries.items()):
                family.add_metric([*self.common_label_values, *labels], count, total)
            yield family
        for name, facts in list(self._infos.items()):
            yield CATALOGUE[name].info({**self._common, **facts})

    def describe(self) -> list[Metric]:
        """Nothing: names are known when collected, and registration must not collect."""
        return []

    def _own_labels(self, name: str) -> Mapping[str, tuple[str, ...]]:
        entry = CATALOGUE[name]
        assert entry.labels[: len(self._common)] == tuple(self._common), f"{name} carries other common labels"
        return entry.own_labels


def sanitize_label(value: str) -> str:
    """Return printable, encodable text of bounded length for a label."""
    shown = printable(value)
    return shown if len(shown) <= MAX_LABEL_LENGTH else f"{shown[: MAX_LABEL_LENGTH - 3]}..."


SeriesValue = float | None


def series_values(text: str) -> dict[str, SeriesValue]:
    """Return every sample by its PromQL series, without histogram buckets; None for NaN and infinity."""
    return {
        _series_name(sample.name, sample.labels): sample.value if math.isfinite(sample.value) else None
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def _series_name(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{_escape_label(value)}"' for key, value in labels.items())
    return f"{name}{{{inside}}}" if inside else name


def _escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


SNAPSHOT_SECONDS = 1.0

disable_created_metrics()  # type: ignore[no-untyped-call]


def snapshot_path(directory: Path, rank: int) -> Path:
    return directory / f"metrics-{rank}.prom"


class SnapshotWriter:
    """Writer of `registry` to `path` once a second until closed, and once more then; use it as a context manager."""

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
    """Merge expositions: one HELP and one TYPE per family, samples in the order of `texts`.

    The texts come from `generate_latest`, in which each family is one block that begins with its HELP line.
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
