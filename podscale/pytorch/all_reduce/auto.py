"""Choice of the all-reduce algorithm for `algorithm: auto`, and the error of an all-reduce in a short wire format.

`auto` measures the links for about two seconds, fits latency and bandwidth of each axis, and chooses by the cost model.
Every time is the slowest rank's. The choice is stored (see `stored_choice`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.config import RunConfig
from podscale.config.train import AllReduceSection
from podscale.distributed.waits import waiting_for
from podscale.hardware.collective_cost import AllReduceChoice, Fabric, LinkAxis, choose_all_reduce, fit_link_axis
from podscale.pytorch.all_reduce.algorithms import AllReduce
from podscale.pytorch.all_reduce.wire_formats import WIRE_FORMATS
from podscale.pytorch.mesh import Axis, build_line, build_mesh, plan_rows
from podscale.pytorch.stored_choice import StoredChoice
from podscale.pytorch.timing import time_slowest_rank
from podscale.pytorch.world import World
from podscale.training.fine_tuning import trained_spec

CANDIDATES = ("flat", "tree", "hierarchical", "torus2d")
"""Algorithms that `auto` considers. The backend's own is a ring too, and hybrid needs buckets of several sizes."""
WITH_ROWS = ("hierarchical", "torus2d")
SHARDED_CANDIDATES = ("flat", "torus2d")
PROBES = ((2**10, 3), (2**13, 3), (2**16, 3), (2**19, 3), (2**22, 2), (2**25, 2))
"""Sizes of the probes, bytes, and their repeats; larger ones are skipped when the time of the axis is used up."""
SECONDS_PER_AXIS = 0.8
"""Maximum duration of the probes of one axis, seconds."""


@dataclass(frozen=True)
class AlgorithmChoice:
    """Result of `auto`; `is_reused` if an earlier launch of this run made the choice."""

    choice: AllReduceChoice
    fabric: Fabric
    is_reused: bool

    def section(self, auto: AllReduceSection) -> AllReduceSection:
        """Return the section with the choice in place of `auto`."""
        chosen = {"algorithm": self.choice.algorithm, "bucket_mb": self.choice.bucket_mb}
        return AllReduceSection.model_validate(auto.model_dump() | chosen)

    def facts(self) -> dict[str, str]:
        """Return choice and fit as texts, for the log and the info metric."""
        facts = {"algorithm": self.choice.algorithm, "bucket_mb": f"{self.choice.bucket_mb:g}"}
        for name, axis in (("row", self.fabric.row), ("column", self.fabric.column), ("world", self.fabric.world)):
            facts[f"{name}_ranks"] = str(axis.ranks)
            if axis.ranks > 1:
                facts[f"{name}_latency_us"] = f"{axis.latency * 1e6:.4g}"
                facts[f"{name}_mb_per_second"] = f"{1e-6 / axis.per_byte:.4g}"
        return facts


def resolve_all_reduce(config: RunConfig, world: World, classes: int, stored: StoredChoice) -> RunConfig:
    """Return the document with `algorithm: auto` replaced by a choice. Every rank must call this at the same time."""
    section = config.train.all_reduce
    if section.algorithm != "auto":
        return config
    sharded = config.train.weight_update == "sharded"
    chosen = resolve_algorithm(
        section, world, 4 * trained_spec(config, classes).num_parameters, stored, sharded=sharded
    )
    stored.report(chosen.facts(), kept=chosen.is_reused)
    train = config.train.model_copy(update={"all_reduce": chosen.section(section)})
    return config.model_copy(update={"train": train})


@waiting_for("the choice of an all-reduce algorithm")
def resolve_algorithm(
    section: AllReduceSection, world: World, gradient_bytes: int, stored: StoredChoice, *, sharded: bool = False
) -> AlgorithmChoice:
    """Return the choice for gradients of `gradient_bytes`, the stored one if it was made for the same ranks.

    Every rank must call this at the same time. `sharded` allows only algorithms with a reduce-scatter.
    """
    rows = plan_rows(world.nodes(), section.row)
    wires = [section.wire_row, section.wire_column]

    def measure() -> dict[str, Any]:
        fabric = measure_fabric(world, section.row)
        row_volume, column_volume = (WIRE_FORMATS[wire].bytes_per_value / 4 for wire in wires)
        links = fabric.with_wire_formats(row_volume, column_volume)
        choice = choose_all_reduce(links, gradient_bytes, _allowed_algorithms(section, sharded))
        return {"choice": asdict(choice), "fabric": asdict(fabric)}

    key = [world.size, rows, gradient_bytes, world.device.type, wires, sharded]
    record, is_reused = stored.keep(world, key, measure)
    return _parse_choice(record, is_reused=is_reused)


def _allowed_algorithms(section: AllReduceSection, sharded: bool) -> Sequence[str]:
    """Return the algorithms that the document allows. A wire format for rows needs an algorithm with rows."""
    allowed = [name for name in CANDIDATES if section.wire_row == "fp32" or name in WITH_ROWS]
    return [name for name in allowed if not sharded or name in SHARDED_CANDIDATES]


def measure_fabric(world: World, row: int | None) -> Fabric:
    """Measure latency and bandwidth of both axes and of the ring through all ranks. Same result on every rank."""
    mesh = build_mesh(world, row)
    axes = [mesh.row, mesh.column]
    row_links, column_links = _measure_axis(world, mesh.row), _measure_axis(world, mesh.column)
    if 1 in (mesh.row.size, mesh.column.size):
        ring_links = row_links if mesh.column.size == 1 else column_links
    else:
        axes.append(build_line(world))
        ring_links = _measure_axis(world, axes[-1])
        slowest = max(ring_links.per_byte, row_links.per_byte, column_links.per_byte / row_links.ranks)
        ring_links = ring_links._replace(per_byte=slowest)  # the ring uses the links of both axes
    for axis in axes:
        dist.destroy_process_group(axis.group)  # training builds the groups that its algorithm needs
    slices = {"slice_bytes": 8 * 2**20} if world.on_gpu else {}
    return Fabric(row_links, column_links, ring_links, **slices)


def _measure_axis(world: World, axis: Axis) -> LinkAxis:
    """Time all-reduces of the backend in all groups of an axis at once, for at most SECONDS_PER_AXIS."""
    if axis.size == 1:
        return fit_link_axis(1, (), ())
    sizes: list[int] = []
    seconds: list[float] = []
    spent = 0.0
    for size, repeats in PROBES:
        if seconds and spent + repeats * seconds[-1] * size / sizes[-1] > SECONDS_PER_AXIS and size > PROBES[2][0]:
            break
        values = torch.zeros(size // 4, device=world.device)

        def reduce(values: Tensor = values) -> None:
            dist.all_reduce(values, group=axis.group)

        if not sizes:
            time_slowest_rank(world, reduce)  # the first message opens the connections
        times = [time_slowest_rank(world, reduce) for _ in range(repeats)]
        sizes.append(size)
        seconds.append(min(times))
        spent += sum(times)
    return fit_link_axis(axis.size, sizes, seconds)


def _parse_choice(record: dict[str, Any], *, is_reused: bool) -> AlgorithmChoice:
    axes = {name: LinkAxis(*record["fabric"].pop(name)) for name in ("row", "column", "world")}
    return AlgorithmChoice(AllReduceChoice(**record["choice"]), Fabric(**(record["fabric"] | axes)), is_reused)


SHARED_SIGNAL = 0.05
"""Standard deviation of the part of a gradient that all ranks share; that of the noise is 1."""


def relative_error(all_reduce: AllReduce, world: World, length: int) -> float:
    """Return |mean - exact| / |exact| (L2) over a bucket of `length` elements, exact being an fp64 all-reduce.

    The values resemble gradients of a large batch, mostly noise that cancels: the worst case for a sum in low
    precision. Every rank must call this at the same time; the result is the same on all.
    """
    generator = torch.Generator(world.device)
    signal = torch.randn(length, generator=generator.manual_seed(0), device=world.device)
    noise = torch.randn(length, generator=generator.manual_seed(1 + world.rank), device=world.device)
    mean = SHARED_SIGNAL * signal + noise
    exact = mean.double()
    dist.all_reduce(exact)
    exact /= world.size
    all_reduce(mean)
    return float((mean - exact).norm() / exact.norm())
