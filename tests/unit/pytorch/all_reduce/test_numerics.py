"""The error of a mean of 2048 gradients in low precision, by the orders in which our all-reduces add.

Reproduces the simulation of which the expected values are known: signal 0.05, noise 1, every partial sum rounded. The
orders are those that the plans of messages follow (tests/unit/pytorch/all_reduce/test_plan.py) and that real worlds
give bit by bit (tests/distributed/pytorch/all_reduce/test_algorithms.py), so this fails when the order of an
implementation changes.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.support.reduction import chain, on_wire, ring_order, torus2d, tree

RANKS, ELEMENTS = 2048, 1024


@pytest.fixture(scope="module")
def gradients() -> list[Tensor]:
    """One a rank, already divided by the number of ranks."""
    generator = torch.Generator().manual_seed(0)
    signal = 0.05 * torch.randn(ELEMENTS, generator=generator)
    return [(signal + torch.randn(ELEMENTS, generator=generator)) / RANKS for _ in range(RANKS)]


def flat_ring(values: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """One part of a ring; parts differ only in where they start."""
    return on_wire(chain(values, ring_order(0, len(values)), wire), wire)


def grid(row: int) -> Callable[[Sequence[Tensor], torch.dtype], Tensor]:
    return lambda values, wire: torus2d(values, row, wire, lambda shards: flat_ring(shards, wire))


def exact_nodes(column: Callable[[Sequence[Tensor], torch.dtype], Tensor]) -> Callable[..., Tensor]:
    """fp32 inside a node of 8, `wire` between nodes."""
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
