"""Work on matrices that ranks with the same weights share: the owner of each item, and the message of all results.

An owner computes an item once, and all ranks get the result, so it is bit-identical everywhere (Anil 2020, section 5).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from podscale.pytorch.optim.base import ReplicaGroup


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank that owns each item. The most costly goes first, each to the rank with the least total cost."""
    owners, totals = [0] * len(costs), [0.0] * ranks
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        rank = min(range(ranks), key=totals.__getitem__)
        owners[number] = rank
        totals[rank] += costs[number]
    return owners


def message_layout(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> tuple[int, list[int]]:
    """Return the length of a rank's part of the gathered message, equal for all, and the start of each item in it.

    Args:
        sizes: elements of each item.
    """
    lengths = [0] * ranks
    local_starts = []
    for size, owner in zip(sizes, owners, strict=True):
        local_starts.append(lengths[owner])
        lengths[owner] += size
    length = max(lengths)
    return length, [owner * length + start for owner, start in zip(owners, local_starts, strict=True)]


def gather_message(local: Sequence[Tensor], length: int, replica_group: ReplicaGroup) -> Tensor:
    """Return the message of all ranks; `local` has this rank's items, in order, of at most `length` elements."""
    message = torch.cat([items.reshape(-1) for items in local])
    return replica_group.all_gather(torch.nn.functional.pad(message, (0, length - len(message))))
