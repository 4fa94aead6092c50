"""All-reduce algorithms on 2, 3, 4 and 8 processes: means are right to rounding, and additions in the planned order."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from podscale.config.train import AllReduceSection
from podscale.errors import InputError
from podscale.pytorch import comm_queue
from podscale.pytorch.all_reduce import (
    AllReduce,
    ShardedAllReduce,
    Torus2DAllReduce,
    WorldTorus2DAllReduce,
    algorithms,
    build_all_reduce,
    collectives,
)
from podscale.pytorch.all_reduce.wire_formats import WIRE_FORMATS, CastFormat, WireFormat
from podscale.pytorch.mesh import Axis, build_line, build_mesh
from podscale.pytorch.world import World
from tests.support import reduction

LENGTHS = (1, 5, 64, 101, 203)
LONG = 1201
"""Length with more segments in a part than messages in flight, elements."""
SMALL = 101
"""Threshold of hybrid, elements."""
TOLERANCE = {"fp32": 1e-6, "fp16": 4e-3, "bf16": 3e-2}


class Case(NamedTuple):
    algorithm: str
    row: int | None = None
    wire_row: str = "fp32"
    wire_column: str = "fp32"
    shard_over: str = "row"

    def build(self, world: World) -> AllReduce:
        section = AllReduceSection(**self._asdict(), hybrid_mb=SMALL * 4 / 2**20)
        return build_all_reduce(section, world)


def cases(size: int) -> Iterator[Case]:
    for wire in ("fp32", "bf16", "fp16"):
        yield from (Case(name, None, "fp32", wire) for name in ("flat", "ring", "tree"))
    rows = {2: (1, 2), 3: (1, 3), 4: (1, 2, 4), 8: (2, 4)}[size]
    for name in ("hierarchical", "torus2d", "hybrid"):
        yield from (Case(name, row) for row in rows)
        yield from (Case(name, row, *wires) for row in rows for wires in (("fp32", "bf16"), ("fp16", "bf16")))


@pytest.fixture(scope="module", autouse=True)
def oracle_has_short_messages() -> Iterator[None]:
    with short_messages():
        yield


@contextmanager
def short_messages() -> Iterator[None]:
    """Use short segments and slices, so that small buckets have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(collectives.SEGMENT_ELEMENTS, "cpu", 7)
        patch.setitem(comm_queue.SLICE_ELEMENTS, "cpu", 32)
        yield


def contribution(rank: int, length: int) -> Tensor:
    return 0.05 + torch.randn(length, generator=torch.Generator().manual_seed(1000 * length + rank))


@short_messages()
def everything(world: World) -> dict[tuple[Case, int], Tensor]:
    means = {}
    for case in cases(world.size):
        all_reduce = case.build(world)
        for length in (*LENGTHS, LONG) if case.wire_column == "fp32" else LENGTHS:
            means[case, length] = bucket = contribution(world.rank, length)
            all_reduce(bucket)
            if case.algorithm == "flat":  # test_sums_have_the_bits_of_the_planned_order checks the others
                again = contribution(world.rank, length)
                all_reduce(again)
                assert torch.equal(bucket, again), (case, length)
    return means


@pytest.fixture(scope="module", params=[2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def worlds(request: pytest.FixtureRequest, run_world: Any) -> list[dict[tuple[Case, int], Tensor]]:
    ranks: list[dict[tuple[Case, int], Tensor]] = run_world(request.param, everything)
    return ranks


def test_means_are_exact_to_rounding_and_equal_on_all_ranks(worlds: list[dict[tuple[Case, int], Tensor]]) -> None:
    assert worlds[0].keys() == worlds[-1].keys()
    for (case, length), mean in worlds[0].items():
        exact = torch.stack([contribution(rank, length).double() for rank in range(len(worlds))]).mean(0)
        tolerance = max(TOLERANCE[case.wire_row], TOLERANCE[case.wire_column])
        assert (mean - exact).abs().max() < tolerance, (case, length)
        for other in worlds[1:]:
            assert torch.equal(mean, other[case, length]), (case, length)


def test_sums_have_the_bits_of_the_planned_order(worlds: list[dict[tuple[Case, int], Tensor]]) -> None:
    size = len(worlds)
    for (case, length), mean in worlds[0].items():
        if case.algorithm == "flat":  # gloo's order is not ours
            continue
        values = [contribution(rank, length) * (1.0 / size) for rank in range(size)]
        assert torch.equal(mean, simulated(case, values)), (case, length)


def simulated(case: Case, values: list[Tensor]) -> Tensor:
    wire_row, wire = WIRE_FORMATS[case.wire_row], WIRE_FORMATS[case.wire_column]
    column: Callable[..., Tensor] = functools.partial(reduction.ring, wire=wire)
    name = case.algorithm
    if name == "hybrid":
        name = "hierarchical" if len(values[0]) < SMALL else "ring"
    match name:
        case "ring":
            return reduction.ring(values, wire)
        case "tree":
            return reduction.double_tree(values, wire)
        case "torus2d":
            return reduction.torus2d(values, case.row or len(values), wire_row, column)
        case _:
            return reduction.hierarchical(values, case.row or len(values), wire_row, column)


@short_messages()
def halves(world: World) -> None:
    """Assert that reduce-scatter and all-gather make up the all-reduce, and that all-gather does not round."""
    exact = Case("torus2d", 2, shard_over="world").build(world)
    assert isinstance(exact, WorldTorus2DAllReduce)
    mean = torch.stack([contribution(rank, LONG - 1).double() for rank in range(world.size)]).mean(0)
    shard = exact.reduce_scatter(contribution(world.rank, LONG - 1))
    assert (shard - mean.view(world.size, -1)[exact.shard]).abs().max() < TOLERANCE["fp32"]
    built = [Case(name, None, "fp32", "bf16").build(world) for name in ("flat", "ring")]
    built += [Case("torus2d", row, "bf16", "bf16", over).build(world) for row in (1, 2, 4) for over in ("row", "world")]
    for all_reduce in built:
        assert isinstance(all_reduce, ShardedAllReduce)
        assert all_reduce.shards in (world.size, 1, 2)
        length = 36 * all_reduce.shards
        averaged, bucket = contribution(world.rank, length), contribution(world.rank, length)
        all_reduce(averaged)
        shard = all_reduce.reduce_scatter(bucket)
        start = 36 * all_reduce.shard
        local = averaged[start : start + 36]
        if isinstance(all_reduce, WorldTorus2DAllReduce):  # its columns add the parts of a slice in another order
            assert (shard - local).abs().max() < TOLERANCE["bf16"]
        else:
            assert torch.equal(shard.bfloat16().float(), local.bfloat16().float())
        weights = torch.arange(float(length)) + 1 / 3
        for dtype in (torch.float32, torch.bfloat16):
            gathered = torch.zeros(length, dtype=dtype)
            all_reduce.all_gather(weights[start : start + 36].to(dtype), gathered)
            assert torch.equal(gathered, weights.to(dtype))


def test_reduce_scatter_and_all_gather_make_up_the_all_reduce(run_world: Any) -> None:
    run_world(4, halves)


@short_messages()
def as_on_gpus(world: World) -> None:
    """Check the grids with the backend's own collectives, as on GPUs, but with gloo's."""

    def backend(axis: Axis, wire: WireFormat, device: torch.device) -> collectives.AxisCollectives:
        assert isinstance(wire, CastFormat)
        return collectives.BackendCollectives(axis, wire.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithms, "build_collectives", backend)
        for name, row, wire in product(("torus2d", "hierarchical"), (1, 2, 4), ("fp32", "bf16")):
            all_reduce = Case(name, row, wire, wire).build(world)
            for length in LENGTHS:
                mean = contribution(world.rank, length)
                all_reduce(mean)
                exact = torch.stack([contribution(rank, length).double() for rank in range(world.size)]).mean(0)
                assert (mean - exact).abs().max() < TOLERANCE[wire], (name, row, wire, length)


def test_grids_over_the_backends_own_collectives(run_world: Any) -> None:
    run_world(4, as_on_gpus)


@short_messages()
def scattered_nodes(world: World) -> tuple[Any, Tensor]:
    """Run with ranks 0, 2, 4, 6 on one node and 1, 3, 5, 7 on the other."""
    world = replace(world, node=world.rank % 2)
    mesh = build_mesh(world)
    bucket = contribution(world.rank, 203)
    Torus2DAllReduce(mesh, world.device)(bucket)
    ring, averaged, gathered = Case("ring").build(world), contribution(world.rank, 64), torch.empty(64)
    assert isinstance(ring, ShardedAllReduce)
    ring(averaged)
    ring.all_gather(ring.reduce_scatter(contribution(world.rank, 64)), gathered)
    assert torch.equal(averaged, gathered)
    named = mesh.device_mesh("cpu")
    assert torch.distributed.get_process_group_ranks(named.get_group("row")) == sorted(mesh.row.ranks)
    return (mesh.shape, mesh.row.ranks, mesh.column.ranks, build_line(world).ranks), bucket


def test_rows_follow_the_nodes(run_world: Any) -> None:
    found = run_world(8, scattered_nodes)
    exact = torch.stack([contribution(rank, 203).double() for rank in range(8)]).mean(0)
    for rank, ((shape, row, column, line), mean) in enumerate(found):
        assert shape == (2, 4)
        assert row == tuple(range(rank % 2, 8, 2))
        assert column == (rank - rank % 2, rank - rank % 2 + 1)
        assert line == (0, 2, 4, 6, 1, 3, 5, 7)
        assert torch.equal(mean, found[0][1])
        assert (mean - exact).abs().max() < 1e-6


@short_messages()
def misfits(world: World) -> list[tuple[str, object, str]]:
    uneven = replace(world, node=0 if world.rank < 3 else 1)
    messages = []
    for location, section in (
        (world, AllReduceSection(algorithm="torus2d", row=3)),
        (uneven, AllReduceSection(algorithm="hierarchical")),
        (world, AllReduceSection(backend="nccl")),
    ):
        with pytest.raises(InputError) as error:
            build_all_reduce(section, location)
        messages.append((error.value.field, error.value.got, error.value.problem))
    bucket = torch.full((5,), float(world.rank))
    build_all_reduce(AllReduceSection(algorithm="torus2d", row=2), uneven)(bucket)
    assert bucket.tolist() == [1.5] * 5
    return messages


def test_options_that_do_not_fit_are_refused_equally_on_every_rank(run_world: Any) -> None:
    found = run_world(4, misfits)
    assert found == [found[0]] * 4
    row, uneven, nccl = found[0]
    assert row[:2] == ("train.all_reduce.row", 3)
    assert "4 ranks" in row[2]
    assert uneven[:2] == ("train.all_reduce.row", None)
    assert "node 0: 3, node 1: 1" in uneven[2]
    assert nccl[:2] == ("train.all_reduce.backend", "nccl")
