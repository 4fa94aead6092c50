"""Rows of the mesh are nodes or parts of nodes; other grids are refused."""

import pytest

from podscale.pytorch.mesh import plan_rows
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("nodes", "row", "rows"),
    [
        ([0], None, ((0,),)),
        ([0, 0, 0, 0], None, ((0, 1, 2, 3),)),
        ([0, 0, 1, 1, 2, 2], None, ((0, 1), (2, 3), (4, 5))),
        ([0, 1, 0, 1], None, ((0, 2), (1, 3))),
        ([5, 5, 3, 3], None, ((0, 1), (2, 3))),
        ([0, 0, 0, 0], 2, ((0, 1), (2, 3))),
        ([0, 1, 0, 1], 1, ((0,), (2,), (1,), (3,))),
        ([0, 0, 0, 1], 2, ((0, 1), (2, 3))),
        ([0, 1, 0, 1, 0, 1], 2, ((0, 2), (1, 4), (3, 5))),
        ([0, 0, 1, 1], 4, ((0, 1, 2, 3),)),
    ],
)
def test_rows(nodes: list[int], row: int | None, rows: tuple[tuple[int, ...], ...]) -> None:
    assert plan_rows(nodes, row) == rows


def test_nodes_of_unequal_size_make_no_grid() -> None:
    with refused("node 0: 2, node 1: 3", "divisor of 5", field="train.all_reduce.row", got=None):
        plan_rows([0, 0, 1, 1, 1])


def test_rows_that_do_not_divide_are_refused() -> None:
    with refused("6 ranks", "divisor of 6", field="train.all_reduce.row", got=4):
        plan_rows([0] * 6, 4)
