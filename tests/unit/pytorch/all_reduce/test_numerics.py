"""Error of a mean of 2048 gradients in low precision, by the order in which each all-reduce adds.

The simulation has signal 0.05, noise 1, and rounds every partial sum. The expected values are those of an earlier
simulation. Message plans add in these orders (tests/unit/pytorch/all_reduce/test_plan.py), and so do real worlds, bit
for bit (tests/distributed/pytorch/all_reduce/test_algorithms.py), so this fails if the order of an implementation
changes.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from podscale.pytorch.all_reduce.wire_formats import FP32, WIRE_FORMATS, WireFormat
from tests.support.reduction import chain, exchange, on_wire, ring_order, torus2d, tree

RANKS, ELEMENTS = 2048, 1024


@pytest.fixture(scope="module")
def gradients() -> list[Tensor]:
    """Return the gradient of each rank, divided by the number of ranks."""
    generator = torch.Generator().manual_seed(0)
    signal = 0.05 * torch.randn(ELEMENTS, generator=generator)
    return [(signal + torch.randn(ELEMENTS, generator=generator)) / RANKS for _ in range(RANKS)]


def flat_ring(values: Sequence[Tensor], wire: WireFormat) -> Tensor:
    """Return one part of a ring's sum; parts differ only in the rank where they start."""
    return on_wire(chain(values, ring_order(0, len(values)), wire), wire)


def grid(row: int) -> Callable[[Sequence[Tensor], WireFormat], Tensor]:
    return lambda values, wire: torus2d(values, row, wire, lambda shards: flat_ring(shards, wire))


def exact_nodes(column: Callable[[Sequence[Tensor], WireFormat], Tensor]) -> Callable[..., Tensor]:
    """Add in fp32 inside a node of 8 ranks, in `wire` between nodes."""
    return lambda values, wire: torus2d(values, 8, FP32, lambda shards: column(shards, wire))


def all_to_all(values: Sequence[Tensor], wire: WireFormat) -> Tensor:
    """Return one part of a sum whose contributions are rounded once."""
    return on_wire(exchange(values, 0, wire), wire)


def all_to_all_grid(row: int) -> Callable[[Sequence[Tensor], WireFormat], Tensor]:
    def reduce(values: Sequence[Tensor], wire: WireFormat) -> Tensor:
        rows = [exchange(values[start : start + row], 0, wire) for start in range(0, len(values), row)]
        return on_wire(all_to_all(rows, wire), wire)

    return reduce


BF16, FP16, INT8 = WIRE_FORMATS["bf16"], WIRE_FORMATS["fp16"], WIRE_FORMATS["int8"]
TABLE = [
    ("flat ring", flat_ring, BF16, 0.045),
    ("flat ring", flat_ring, FP16, 0.0055),
    ("8 x 256", grid(8), BF16, 0.0165),
    ("8 x 256", grid(8), FP16, 0.0020),
    ("32 x 64", grid(32), BF16, 0.0086),
    ("32 x 64", grid(32), FP16, 0.0011),
    ("tree", tree, BF16, 0.0034),
    ("tree", tree, FP16, 0.00043),
    ("fp32 in the node, ring between", exact_nodes(flat_ring), BF16, 0.016),
    ("fp32 in the node, ring between", exact_nodes(flat_ring), FP16, 0.0020),
    ("fp32 in the node, tree between", exact_nodes(tree), BF16, 0.0032),
    ("fp32 in the node, tree between", exact_nodes(tree), FP16, 0.00041),
    ("flat ring", flat_ring, FP32, 7e-7),
    ("flat ring", flat_ring, INT8, 0.205),
    ("tree", tree, INT8, 0.0149),
    ("all-to-all", all_to_all, INT8, 0.0080),
    ("8 x 256, all-to-all", all_to_all_grid(8), INT8, 0.0084),
    ("32 x 64, all-to-all", all_to_all_grid(32), INT8, 0.0085),
    ("fp32 in the node, all-to-all between", exact_nodes(all_to_all), INT8, 0.0075),
]


def name_of(wire: WireFormat) -> str:
    return next(name for name, known in WIRE_FORMATS.items() if known == wire)


@pytest.mark.parametrize(
    ("order", "wire", "expected"), [row[1:] for row in TABLE], ids=[f"{row[0]}, {name_of(row[2])}" for row in TABLE]
)
def test_error_of_the_mean(
    gradients: list[Tensor], order: Callable[..., Tensor], wire: WireFormat, expected: float
) -> None:
    exact = torch.stack(gradients).double().sum(0)
    error = (order(gradients, wire) - exact).norm() / exact.norm()
    assert error.item() == pytest.approx(expected, rel=0.15)
