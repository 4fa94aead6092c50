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

from tests.support.reduction import chain, on_wire, ring_order, torus2d, tree

RANKS, ELEMENTS = 2048, 1024


@pytest.fixture(scope="module")
def gradients() -> list[Tensor]:
    """Return the gradient of each rank, divided by the number of ranks."""
    generator = torch.Generator().manual_seed(0)
    signal = 0.05 * torch.randn(ELEMENTS, generator=generator)
    return [(signal + torch.randn(ELEMENTS, generator=generator)) / RANKS for _ in range(RANKS)]


def flat_ring(values: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """Return one part of a ring's sum; parts differ only in the rank where they start."""
    return on_wire(chain(values, ring_order(0, len(values)), wire), wire)


def grid(row: int) -> Callable[[Sequence[Tensor], torch.dtype], Tensor]:
    return lambda values, wire: torus2d(values, row, wire, lambda shards: flat_ring(shards, wire))


def exact_nodes(column: Callable[[Sequence[Tensor], torch.dtype], Tensor]) -> Callable[..., Tensor]:
    """Add in fp32 inside a node of 8 ranks, in `wire` between nodes."""
    return lambda values, wire: torus2d(values, 8, torch.float32, lambda shards: column(shards, wire))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
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
]


@pytest.mark.parametrize(
    ("order", "wire", "expected"), [row[1:] for row in TABLE], ids=[f"{row[0]}, {str(row[2])[6:]}" for row in TABLE]
)
def test_error_of_the_mean(
    gradients: list[Tensor], order: Callable[..., Tensor], wire: torch.dtype, expected: float
) -> None:
    exact = torch.stack(gradients).double().sum(0)
    error = (order(gradients, wire) - exact).norm() / exact.norm()
    assert error.item() == pytest.approx(expected, rel=0.15)
