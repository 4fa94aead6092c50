"""`auto`: measures the links for a moment, fits latency and bandwidth of each axis, and chooses by the cost model.

Every time that counts is the slowest rank's, so all ranks hold the same numbers; rank 0 decides and says so to all.
A choice made once is kept in the run directory and taken again when the run continues at the same size: another
algorithm would add in another order, and the resumed run would not have the bits of an uninterrupted one.

How far an all-reduce is from the exact mean, measured with the real ranks before a training relies on it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from podscale import models
from podscale.config import RunConfig
from podscale.config.train import AllReduceSection
from podscale.distributed.waits import waiting_for
from podscale.hardware.all_reduce_choice import AllReduceChoice, choose_all_reduce, fit_link_axis
from podscale.hardware.collective_cost import Fabric, LinkAxis
from podscale.pytorch.all_reduce.algorithms import WIRE_DTYPES, AllReduce
from podscale.pytorch.mesh import Axis as Group
from podscale.pytorch.mesh import build_line, build_mesh, plan_rows
from podscale.pytorch.timing import time_slowest_rank
from podscale.pytorch.world import World
from podscale.util.files import write_json

CANDIDATES = ("flat", "tree", "hierarchical", "torus2d")
"""What `auto` chooses from: the backend's own is a ring too, and buckets of one size leave hybrid nothing to choose."""
WITH_ROWS = ("hierarchical", "torus2d")
SHARDED_CANDIDATES = ("flat", "torus2d")
PROBES = ((2**10, 3), (2**13, 3), (2**16, 3), (2**19, 3), (2**22, 2), (2**25, 2))
"""Bytes of the probes, and how often each is sent; the larger ones as far as the time goes."""
SECONDS_PER_AXIS = 0.8
"""Longest probe of one of the three axes."""


@dataclass(frozen=True)
class AlgorithmChoice:
    """What `auto` came to. is_reused: it was chosen by an earlier launch of this run."""

    choice: AllReduceChoice
    fabric: Fabric
    is_reused: bool

    def section(self, asked: AllReduceSection) -> AllReduceSection:
        """The asked section with the choice in place of `auto`."""
        chosen = {"algorithm": self.choice.algorithm, "bucket_mb": self.choice.bucket_mb}
        return AllReduceSection.model_validate(asked.model_dump() | chosen)

    def facts(self) -> dict[str, str]:
        """Choice and fit as texts, for the log and the info metric."""
        found = {"algorithm": self.choice.algorithm, "bucket_mb": f"{self.choice.bucket_mb:g}"}
        for name, axis in (("row", self.fabric.row), ("column", self.fabric.column), ("world", self.fabric.world)):
            found[f"{name}_ranks"] = str(axis.ranks)
            if axis.ranks > 1:
                found[f"{name}_latency_us"] = f"{axis.latency * 1e6:.4g}"
                found[f"{name}_mb_per_second"] = f"{1e-6 / axis.per_byte:.4g}"
        return found


def resolve_all_reduce(
    config: RunConfig,
    world: World,
    classes: int,
    choice_file: Path,
    fence: Callable[[], None] | None,
    report: Callable[..., None],
) -> RunConfig:
    """The document with `auto`, if it says so, replaced by what was chosen; all ranks must call this at the same time.

    choice_file: where rank 0 reads and writes the choice, after `fence`. report: gets the facts, on every rank.
    """
    asked = config.train.all_reduce
    if asked.algorithm != "auto":
        return config
    if world.is_rank0 and fence is not None:
        fence()
    halves = config.train.weight_update == "sharded"
    settled = resolve_algorithm(
        asked, world, 4 * models.model_spec(config.model, classes).num_parameters, choice_file, sharded=halves
    )
    report(settled.facts(), kept=settled.is_reused)
    train = config.train.model_copy(update={"all_reduce": settled.section(asked)})
    return config.model_copy(update={"train": train})


@waiting_for("the choice of an all-reduce algorithm")
def resolve_algorithm(
    section: AllReduceSection, world: World, gradient_bytes: int, choice_file: Path, *, sharded: bool = False
) -> AlgorithmChoice:
    """The choice for gradients of so many bytes, from `keep` where an earlier launch left one for the same ranks.

    sharded: only what can stop half way will do, since the update is sharded.
    Takes about two seconds at most, besides forming groups. Every rank must call this at the same time.
    """
    rows = plan_rows(world.nodes(), section.row)
    wires = [section.wire_row, section.wire_column]
    key = [world.size, rows, gradient_bytes, world.device.type, wires, sharded]
    answer: list[Any] = [_read_choice(choice_file, key) if world.is_rank0 else None]
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    if answer[0] is not None:
        return _parse_choice(answer[0], kept=True)
    fabric = measure_fabric(world, section.row)
    found: list[Any] = [None]
    if world.is_rank0:
        row, column = (WIRE_DTYPES[wire].itemsize / 4 for wire in wires)
        choice = choose_all_reduce(
            fabric.with_wire_formats(row, column), gradient_bytes, _allowed_algorithms(section, sharded)
        )
        found = [{"key": key, "choice": asdict(choice), "fabric": asdict(fabric)}]
        choice_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(choice_file, found[0])
    dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
    return _parse_choice(found[0], kept=False)


def _allowed_algorithms(section: AllReduceSection, sharded: bool) -> Sequence[str]:
    """Algorithms that the rest of the document allows: a format for rows is of use only to those with rows."""
    unfit = set() if section.wire_row == "fp32" else set(CANDIDATES) - set(WITH_ROWS)
    unfit |= set(CANDIDATES) - set(SHARDED_CANDIDATES) if sharded else set()
    return [name for name in CANDIDATES if name not in unfit]


def measure_fabric(world: World, row: int | None) -> Fabric:
    """Latency and bandwidth of both axes and of the ring through all ranks, the same numbers on every rank."""
    mesh = build_mesh(world, row)
    groups = [mesh.row, mesh.column]
    inside, across = _measure_axis(world, mesh.row), _measure_axis(world, mesh.column)
    if 1 in (mesh.row.size, mesh.column.size):
        through = inside if mesh.column.size == 1 else across
    else:
        groups.append(build_line(world))
        through = _measure_axis(world, groups[-1])  # which passes the links of both, and is no faster than either
        through = through._replace(per_byte=max(through.per_byte, inside.per_byte, across.per_byte / inside.ranks))
    for group in groups:
        dist.destroy_process_group(group.group)  # training makes those of its algorithm alone
    slices = {"slice_bytes": 8 * 2**20} if world.on_gpu else {}
    return Fabric(inside, across, through, **slices)


def _measure_axis(world: World, group: Group) -> LinkAxis:
    """Times all-reduces by the backend, in all groups of an axis at once, until its time is up."""
    if group.size == 1:
        return fit_link_axis(1, (), ())
    sizes: list[int] = []
    seconds: list[float] = []
    spent = 0.0
    for size, repeats in PROBES:
        if seconds and spent + repeats * seconds[-1] * size / sizes[-1] > SECONDS_PER_AXIS and size > PROBES[2][0]:
            break
        values = torch.zeros(size // 4, device=world.device)

        def reduce(values: Tensor = values) -> None:
            dist.all_reduce(values, group=group.group)

        if not sizes:
            time_slowest_rank(world, reduce)  # connections are made by the first message
        times = [time_slowest_rank(world, reduce) for _ in range(repeats)]
        sizes.append(size)
        seconds.append(min(times))
        spent += sum(times)
    return fit_link_axis(group.size, sizes, seconds)


def _read_choice(path: Path, key: list[Any]) -> dict[str, Any] | None:
    """What an earlier launch left for the same ranks, if it can be read."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("key") == json.loads(json.dumps(key)) else None


def _parse_choice(found: dict[str, Any], *, kept: bool) -> AlgorithmChoice:
    axes = {name: LinkAxis(*found["fabric"].pop(name)) for name in ("row", "column", "world")}
    fabric = axes | found["fabric"]
    return AlgorithmChoice(AllReduceChoice(**found["choice"]), Fabric(**fabric), kept)


SHARED_SIGNAL = 0.05
"""Part of a gradient that all ranks share; the rest, of deviation 1, is each rank's own noise."""


def relative_error(all_reduce: AllReduce, world: World, length: int) -> float:
    """|mean - exact| / |exact| (L2) over a bucket of `length` elements; the exact mean by an fp64 all-reduce.

    The values are like gradients of a large batch, mostly noise that cancels: the case in which the error of a low
    precision sum weighs most. Every rank must call this at the same time and gets the same answer.
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
