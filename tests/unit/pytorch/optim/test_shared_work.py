"""Items are assigned to ranks evenly, and each has a place of its own in the message."""

import numpy as np
import pytest

from podscale.pytorch.optim.shared_work import assign_owners, message_layout


@pytest.mark.parametrize("ranks", [1, 3, 8, 40])
def test_items_are_assigned_evenly_and_equally_on_all_ranks(ranks: int) -> None:
    sides = np.random.default_rng(0).integers(1, 65, 50).tolist()
    costs, sizes = [side**3 for side in sides], [side**2 for side in sides]
    owners = assign_owners(costs, ranks)
    assert owners == assign_owners(costs, ranks)
    totals = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert max(totals) - min(totals) <= max(costs)
    length, starts = message_layout(sizes, owners, ranks)
    taken = np.zeros(length * ranks, int)
    for size, owner, start in zip(sizes, owners, starts, strict=True):
        assert owner * length <= start
        assert start + size <= (owner + 1) * length
        taken[start : start + size] += 1
    assert taken.max() == 1
    assert taken.sum() == sum(sizes)


def test_the_most_costly_item_comes_first() -> None:
    assert assign_owners([1, 8, 8, 27], 2) == [1, 1, 1, 0]
