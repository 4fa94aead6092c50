"""int8 messages between real processes: equal bits on all ranks, bounded errors, planned bits, NaN, bytes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from podscale.config.train import AllReduceSection
from podscale.pytorch import comm_queue
from podscale.pytorch.all_reduce import AllReduce, ShardedAllReduce, build_all_reduce, collectives
from podscale.pytorch.all_reduce.plan import equal_spans
from podscale.pytorch.all_reduce.wire_formats import WIRE_FORMATS, BlockInt8Format
from podscale.pytorch.world import World
from tests.distributed.conftest import RunWorld
from tests.support import reduction

INT8 = WIRE_FORMATS["int8"]
LENGTHS = (1, 5, 300, 1203, 2405)
SEGMENT, SLICE = 300, 600
"""Lengths of a segment, which is more than a block, and of a slice."""
SMALL = 301
"""Threshold of hybrid, elements."""
BAD = 7
"""Index of a value that one rank makes infinite, and the next NaN."""


class Case(NamedTuple):
    algorithm: str
    row: int | None = None
    wire_row: str = "fp32"
    wire_column: str = "int8"
    shard_over: str = "row"

    def build(self, world: World) -> AllReduce:
        return build_all_reduce(AllReduceSection(**self._asdict(), hybrid_mb=SMALL * 4 / 2**20), world)

    def roundings(self, length: int, ranks: int) -> int:
        """Return the roundings on the longest way of a value, if a rounded sum of contributions counts as one."""
        row = self.row or ranks
        columns, in_row = ranks // row, self.wire_row == "int8" and row > 1
        across = 2 * (columns > 1) * (self.wire_column == "int8")
        match self.algorithm:
            case "flat":
                return 2
            case "torus2d":
                return across + 2 * in_row
            case "hierarchical":
                return across + row * in_row
            case "hybrid" if length < SMALL:
                return across + row * in_row
            case _:
                return ranks * (self.wire_column == "int8")


def cases(size: int) -> Iterator[Case]:
    yield from (Case(name) for name in ("flat", "ring", "tree"))
    for name in ("hierarchical", "torus2d", "hybrid"):
        for row in (1, 2, 4)[: size // 2 + 1]:
            yield from (Case(name, row), Case(name, row, "int8", "int8"), Case(name, row, "int8", "fp32"))


@contextmanager
def short_messages() -> Iterator[None]:
    with patch.dict(collectives.SEGMENT_ELEMENTS, cpu=SEGMENT), patch.dict(comm_queue.SLICE_ELEMENTS, cpu=SLICE):
        yield


def contribution(rank: int, length: int) -> Tensor:
    """Return values of very different sizes; every third hundred is 0 on all ranks."""
    values = 0.05 + torch.randn(length, generator=torch.Generator().manual_seed(1000 * length + rank))
    index = torch.arange(length) // 100
    return values * 10.0 ** (index % 4 - 2.0) * (index % 3 != 2)


def spoiled(rank: int, length: int) -> Tensor:
    values = contribution(rank, length)
    if length > BAD + 1 and rank < 2:
        values[BAD + rank] = (float("inf"), float("nan"))[rank]
    return values


@short_messages()
def everything(world: World) -> dict[tuple[Case, int], tuple[Tensor, Tensor]]:
    """Return the means of the contributions and of the spoiled ones."""
    means = {}
    for case in cases(world.size):
        all_reduce = case.build(world)
        for length in LENGTHS:
            means[case, length] = bucket, bad = contribution(world.rank, length), spoiled(world.rank, length)
            all_reduce(bucket)
            all_reduce(bad)
            again = contribution(world.rank, length)
            all_reduce(again)
            assert torch.equal(bucket, again), (case, length)
    return means


Means = dict[tuple[Case, int], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module", params=[2, 4])
def worlds(request: pytest.FixtureRequest, run_world: RunWorld) -> list[Means]:
    return run_world(request.param, everything)


def test_errors_are_within_the_roundings_and_bits_equal_on_all_ranks(worlds: list[Means]) -> None:
    size = len(worlds)
    for (case, length), (mean, _) in worlds[0].items():
        values = torch.stack([contribution(rank, length).double() for rank in range(size)]) / size
        error = (mean - values.sum(0)).abs().max().item()
        step = values.abs().max(1).values.sum().item() / 127  # no partial sum is larger
        roundings = case.roundings(length, size)
        assert error <= (roundings / 2 * 1.01 + 1e-4) * step, (case, length)
        assert error > step / 100 or not roundings or length < 300, (case, length, "not int8")
        for other in worlds[1:]:
            assert torch.equal(mean.view(torch.int32), other[case, length][0].view(torch.int32)), (case, length)


def test_values_that_are_not_finite_reach_every_rank_as_such_and_alone(worlds: list[Means]) -> None:
    for (case, length), (mean, bad) in worlds[0].items():
        expected = torch.arange(length).sub(BAD).abs_().lt(0)
        expected[BAD : BAD + 2] = length > BAD + 1
        assert torch.equal(~bad.isfinite(), expected), (case, length)
        assert torch.equal(bad[600:], mean[600:]), "blocks without a bad value"
        for other in worlds[1:]:
            assert torch.equal(bad.view(torch.int32), other[case, length][1].view(torch.int32)), (case, length)


def ring(parts: Sequence[Tensor], number: int) -> Tensor:
    """Return part `number` of a ring's sum: each partial sum is rounded, and so is the result, a segment a message."""
    segments = zip(*(part.split(SEGMENT) for part in parts), strict=True)
    order = reduction.ring_order(number, len(parts))
    return torch.cat([reduction.on_wire(reduction.chain(segment, order, INT8), INT8) for segment in segments])


def all_to_all(parts: Sequence[Tensor], number: int) -> Tensor:
    """Return part `number` of flat's sum: all contributions but the owner's are rounded, and so is the result."""
    return reduction.on_wire(reduction.exchange(parts, number, INT8), INT8)


Simulation = Callable[[Sequence[Tensor], int], Tensor]


@pytest.mark.parametrize(("algorithm", "simulated"), [("ring", ring), ("flat", all_to_all)])
def test_sums_have_the_bits_of_their_order(worlds: list[Means], algorithm: str, simulated: Simulation) -> None:
    size = len(worlds)
    for length in LENGTHS:
        values = [contribution(rank, length) * (1.0 / size) for rank in range(size)]
        spans = [span for span in enumerate(equal_spans(length, size)) if span[1][0] < span[1][1]]
        expected = torch.cat([simulated([v[start:stop] for v in values], number) for number, (start, stop) in spans])
        assert torch.equal(worlds[0][Case(algorithm), length][0], expected), length


@short_messages()
def halves(world: World) -> None:
    """Assert that a shard of the reduce-scatter differs from the all-reduce by the rounding of the gathered sum."""
    built = [Case("flat"), Case("ring"), Case("torus2d", 2, "int8"), Case("torus2d", 2, "int8", shard_over="world")]
    for all_reduce in (case.build(world) for case in built):
        assert isinstance(all_reduce, ShardedAllReduce)
        length = 320 * all_reduce.shards
        averaged, bucket = contribution(world.rank, length), contribution(world.rank, length)
        all_reduce(averaged)
        shard = all_reduce.reduce_scatter(bucket)
        mean = torch.stack([contribution(rank, length).double() for rank in range(world.size)]).mean(0)
        start = 320 * all_reduce.shard
        step = contribution(0, length).abs().max() / 127
        assert (shard - averaged[start : start + 320]).abs().max() < 2 * step
        assert (shard - mean[start : start + 320]).abs().max() < 2 * step
        weights, gathered = torch.arange(float(length)) + 1 / 3, torch.zeros(length)
        all_reduce.all_gather(weights[start : start + 320], gathered)
        assert torch.equal(gathered, weights)


def test_a_reduce_scatter_sends_int8_and_weights_are_gathered_exactly(run_world: RunWorld) -> None:
    run_world(4, halves)


def sent_bytes(world: World) -> dict[str, int]:
    """Return the bytes of the messages that a rank encodes in one all-reduce of 4 x 4,096 values."""
    sent, encode = 0, BlockInt8Format.encode

    def count(wire: BlockInt8Format, values: Tensor) -> Tensor:
        nonlocal sent
        message = encode(wire, values)
        assert message.dtype == torch.uint8
        assert message.is_contiguous()
        sent += message.nbytes
        return message

    counts = {}
    with patch.object(BlockInt8Format, "encode", count):
        for name in ("ring", "flat"):
            all_reduce, sent = Case(name).build(world), 0
            all_reduce(contribution(world.rank, 4 * 4096))
            counts[name] = sent
    return counts


def test_a_ring_sends_a_quarter_of_the_bytes_and_the_scales(run_world: RunWorld) -> None:
    part = 4096 + 4096 // 256 * 4
    for counts in run_world(4, sent_bytes):
        # The all-to-all's message to the rank itself stays there; its gathered part goes to three ranks.
        assert counts == {"ring": 2 * 3 * part, "flat": (4 + 1) * part}
