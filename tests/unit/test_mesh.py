"""Which ranks make up a row: nodes, parts of nodes, or a clear refusal."""

import pytest

from podscale.errors import InputError
from podscale.pytorch.mesh import plan_rows


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
    with pytest.raises(InputError, match=r"unequal numbers of ranks \(node 0: 2, node 1: 3\).*row \(a divisor of 5\)"):
        plan_rows([0, 0, 1, 1, 1])


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match=r"rows of 4 ranks do not divide the 6 ranks.*choose a divisor of 6"):
        plan_rows([0] * 6, 4)
