"""Order of NCCL's calls on paper: ranks that share groups call the same operations in the same order."""

from collections import Counter
from itertools import product
from typing import Any

import pytest

ALGORITHMS = ("flat", "ring", "tree", "hierarchical", "hybrid", "torus2d")
SHARDABLE = ("flat", "ring", "torus2d")
SENDS, RECEIVES = "c10d::send", "c10d::recv_"


def calls(session: Any, ranks: range | tuple[int, ...], **case: Any) -> dict[int, list[tuple[Any, ...]]]:
    """Return the calls of each of 8 ranks on two nodes, in one step."""
    found = {}
    for rank in ranks:
        report = session.run(ranks=8, rank=rank, steps=1, **case)
        assert report["error"] == ""
        found[rank] = [tuple(call) for call in report["collectives"]]
    return found


def disagreements(found: dict[int, list[tuple[Any, ...]]]) -> list[str]:
    """Return what the ranks call differently, with the rank that is not like the others.

    Args:
        found: (group, operator, elements, dtype, root or peer) of each call, by rank.
    """
    messages = []
    groups = {rank: {call[0] for call in sequence} for rank, sequence in found.items()}
    collective = {r: [c for c in s if c[1] not in (SENDS, RECEIVES)] for r, s in found.items()}
    for shared in {frozenset(groups[a] & groups[b]) for a in found for b in found if a != b}:
        members = [rank for rank in found if shared <= groups[rank]]
        sequences = {rank: tuple(call for call in collective[rank] if call[0] in shared) for rank in members}
        usual, _ = Counter(sequences.values()).most_common(1)[0]
        for rank, sequence in sequences.items():
            if sequence != usual:
                index = next(
                    (n for n, (a, b) in enumerate(zip(sequence, usual, strict=False)) if a != b),
                    min(len(sequence), len(usual)),
                )
                pair = [listed[index] if index < len(listed) else "nothing" for listed in (sequence, usual)]
                messages.append(f"rank {rank} calls {pair[0]} as number {index}, others call {pair[1]}")
    return sorted(set(messages)) + _unmatched_messages(found)


def _unmatched_messages(found: dict[int, list[tuple[Any, ...]]]) -> list[str]:
    """Return pairs of ranks of which one does not receive what the other sends, in the same order."""
    messages = []
    for sender in found:
        for receiver in found:
            sent = [c[2:4] for c in found[sender] if c[1] == SENDS and c[4] == receiver]
            received = [c[2:4] for c in found[receiver] if c[1] == RECEIVES and c[4] == sender]
            if sent != received:
                messages.append(
                    f"rank {sender} sends {len(sent)} messages to rank {receiver}: {len(received)} received"
                )
    return messages


def test_ranks_of_a_torus_call_the_same(session: Any) -> None:
    found = calls(session, (0, 1, 4), train={"all_reduce": {"algorithm": "torus2d"}})
    assert disagreements(found) == []
    assert len({call[0] for call in found[0]}) >= 3  # row, column, status


@pytest.mark.parametrize("mutant", ["skipped_bucket", "other_order", "other_length"])
def test_a_rank_that_differs_is_named(session: Any, mutant: str) -> None:
    clean = calls(session, (0, 4), train={"all_reduce": {"algorithm": "torus2d"}})
    broken = calls(session, (1,), train={"all_reduce": {"algorithm": "torus2d"}}, mutant=mutant)
    differences = disagreements(clean | broken | {2: clean[0]})
    assert differences
    assert all("rank 1 " in text for text in differences)


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize(
    ("algorithm", "update", "group"),
    [*product(ALGORITHMS, ["replicated"], [1]), *product(SHARDABLE, ["sharded"], [1]), ("torus2d", "sharded", 4)],
)
def test_every_algorithm_on_every_rank(session: Any, algorithm: str, update: str, group: int) -> None:
    train = {"all_reduce": {"algorithm": algorithm}, "weight_update": update}
    found = calls(session, range(8), train=train, model={"batch_norm": {"group": group}})
    assert disagreements(found) == []
