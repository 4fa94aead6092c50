"""Numbers by the catalogue's names, and the metric families that Prometheus gets of them.

Whoever counts writes plain numbers here; families are made when somebody collects, at most once a second and on
another thread. That keeps the cost of counting below a microsecond.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Protocol

from prometheus_client.core import Metric
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
    """Fit to be a label: text that can be shown and encoded, of bounded length."""
    shown = printable(value)
    return shown if len(shown) <= MAX_LABEL_LENGTH else f"{shown[: MAX_LABEL_LENGTH - 3]}..."
