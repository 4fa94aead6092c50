"""Series that are looked up when somebody collects them, from objects that keep plain numbers."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from podscale.telemetry.catalogue import CATALOGUE

Sample = tuple[str, tuple[str, ...], float]
"""A name of the catalogue, the values of its own labels beside run and rank, and the number."""


class Source(Protocol):
    def samples(self) -> Iterable[Sample]:
        """What is exported at this moment; asked on another thread than the one that counts."""
        ...


class Series(Collector):
    """Exports the samples of `source`; registers itself with `registry`."""

    def __init__(self, registry: CollectorRegistry, source: Source, *, rank: int, run: str) -> None:
        self._source, self._common = source, [run, str(rank)]
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, labels, value in self._source.samples():
            family = families.setdefault(name, CATALOGUE[name].family())
            family.add_metric([*self._common, *labels], value)  # type: ignore[attr-defined]
        yield from families.values()

    def describe(self) -> list[Metric]:
        """Nothing: names are known when collected, and registration must not collect."""
        return []
