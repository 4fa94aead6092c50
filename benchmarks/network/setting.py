"""Setting of a measurement: where its results go, the clusters and the network it is made with, full or small."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.conditions import head
from benchmarks.harness import write_results
from benchmarks.network.lab import Shape
from benchmarks.network.replay import Trace
from podscale.config import ModelSection
from podscale.hardware.collective_cost import bandwidth_bound
from podscale.pytorch.models import build_model
from podscale.report.charts.lines import LineSeries

MB = 1e6
RANK_RATE, NODE_RATE = 100 * MB, 25 * MB
"""Bytes/s of a rank's and of a node's link: so slow that the cores, which move every byte of all ranks, mostly idle."""
SECTIONS: dict[str, dict[str, Any]] = {
    name: {"algorithm": name} for name in ("flat", "ring", "tree", "hierarchical", "torus2d", "hybrid")
}
SHORTER = {"torus2d, bf16 between nodes": {"algorithm": "torus2d", "wire_column": "bf16"}}


@dataclass(frozen=True)
class Setting:
    """Folder of results, and whether this is the small form: two nodes of two ranks, little data, a narrow network."""

    results: Path
    small: bool

    def head(self, part: str, title: str) -> list[str]:
        """Head of a part's page."""
        command = f"python -m benchmarks.network {part}{' --small' if self.small else ''}"
        return head(title, ["torch", "numpy"], command)

    def write(self, name: str, lines: Sequence[str], pictures: Mapping[str, str] | None = None) -> None:
        """Write a part's page."""
        write_results(self.results, f"network-{name}.md", lines, pictures)

    def shape(self, nodes: int, ranks: int, rank_rate: float, node_rate: float, node_delay: float = 0.0) -> Shape:
        """A cluster; of the small form two nodes of two ranks, or one node."""
        if self.small:
            nodes, ranks = min(nodes, 2), min(ranks, 2)
        return Shape(nodes, ranks, rank_rate, node_rate, node_delay)

    @property
    def model(self) -> ModelSection:
        """Network whose gradients are averaged."""
        return ModelSection(name="resnet18", width=4) if self.small else ModelSection(name="resnet50")

    @property
    def side(self) -> int:
        """Pixels of its images."""
        return 32 if self.small else 64

    @property
    def model_name(self) -> str:
        """Its name for people."""
        return "ResNet-18 of width 4" if self.small else "ResNet-50"

    @cached_property
    def gradients(self) -> Trace:
        """Shapes of the network's parameters, without times; of the small form a few of them."""
        shapes = tuple(parameter.shape for parameter in build_model(self.model, 1000).parameters())
        shapes = shapes[:8] if self.small else shapes
        return Trace(shapes, (0.0,) * len(shapes), 0.0, 0.0)


def cores() -> str:
    """Number of cores, which carry every byte of all ranks."""
    number = len(os.sched_getaffinity(0))
    return "One core" if number == 1 else f"{number} cores"


def bound(shape: Shape, megabytes: float) -> float:
    """Lower bound of an all-reduce, seconds, whatever the algorithm."""
    return bandwidth_bound(megabytes * MB, shape.nodes, shape.ranks, shape.rank_rate, shape.node_rate)


def series(points: Mapping[str, Sequence[tuple[float, float]]]) -> list[LineSeries]:
    """Named lines in the colours of reports."""
    return [LineSeries(name, found, number + 1, dots=True) for number, (name, found) in enumerate(points.items())]
