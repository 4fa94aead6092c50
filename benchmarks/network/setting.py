"""Setting of the network benchmark in its full and its small form: results folder, clusters, model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.conditions import head
from benchmarks.harness import write_results
from benchmarks.network.netns_cluster import ClusterShape
from benchmarks.network.replay import StepTrace
from podscale.config import ModelSection
from podscale.hardware.collective_cost import bandwidth_bound
from podscale.pytorch.models import build_model
from podscale.report.charts.lines import LineSeries

MB = 1e6
RANK_RATE, NODE_RATE = 100 * MB, 25 * MB
"""Bytes/s of a rank's and of a node's link, so slow that the cores, which move every byte of all ranks, mostly idle."""


@dataclass(frozen=True)
class Setting:
    """Folder of results, and the form. The small form has two nodes of two ranks, little data and a narrow model."""

    results: Path
    small: bool

    def head(self, part: str, title: str) -> list[str]:
        """Return the head of a part's page."""
        command = f"python -m benchmarks.network {part}{' --small' if self.small else ''}"
        return head(title, ["torch", "numpy"], command)

    def write(self, name: str, lines: Sequence[str], pictures: Mapping[str, str] | None = None) -> None:
        """Write the page of a part."""
        write_results(self.results, f"network-{name}.md", lines, pictures)

    def shape(
        self, nodes: int, ranks: int, rank_rate: float, node_rate: float, node_delay: float = 0.0
    ) -> ClusterShape:
        if self.small:
            nodes, ranks = min(nodes, 2), min(ranks, 2)
        return ClusterShape(nodes, ranks, rank_rate, node_rate, node_delay)

    @property
    def model(self) -> ModelSection:
        return ModelSection(name="resnet18", width=4) if self.small else ModelSection(name="resnet50")

    @property
    def side(self) -> int:
        """Side of the images, pixels."""
        return 32 if self.small else 64

    @property
    def model_name(self) -> str:
        return "ResNet-18 of width 4" if self.small else "ResNet-50"

    @cached_property
    def gradients(self) -> StepTrace:
        """Untimed step with the gradients of the model; in the small form with eight of them."""
        shapes = [parameter.shape for parameter in build_model(self.model, 1000).parameters()]
        return StepTrace.untimed(shapes[:8] if self.small else shapes)


def cores() -> str:
    """Return the number of cores that this process may use, in words."""
    number = len(os.sched_getaffinity(0))
    return "One core" if number == 1 else f"{number} cores"


def bound(shape: ClusterShape, megabytes: float) -> float:
    """Return the lower bound of an all-reduce by any algorithm, seconds."""
    return bandwidth_bound(megabytes * MB, shape.nodes, shape.ranks, shape.rank_rate, shape.node_rate)


def series(points: Mapping[str, Sequence[tuple[float, float]]]) -> list[LineSeries]:
    """Return lines in the colours of reports."""
    return [LineSeries(name, line, number + 1, dots=True) for number, (name, line) in enumerate(points.items())]
