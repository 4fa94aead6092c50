"""Order of NCCL's calls on paper: ranks that share groups call the same operations in the same order."""

import json
from collections import Counter
from itertools import permutations, zip_longest
from typing import Any

import pytest

from tests.paper_gpu.options import ALL_REDUCES, HIERARCHICAL, RING, SHARDED_TORUS, TORUS, option_id

SENDS, RECEIVES = "c10d::send", "c10d::recv_"
Report = dict[str, Any]


def reports(session: Any, ranks: range | tuple[int, ...], **case: Any) -> dict[int, Report]:
    """Return the report of each of 8 ranks on two nodes, of one step."""
    found = {rank: session.run(ranks=8, rank=rank, steps=1, **case) for rank in ranks}
    for report in found.values():
        assert report["error"] == ""
    return found


def disagreements(found: dict[int, Report]) -> list[str]:
    """Return what the ranks do differently, with the rank that is not like the others.

    Args:
        found: report of each rank. A call is (group, operator, elements, dtype, root or peer).
    """
    calls = {rank: [tuple(call) for call in report["collectives"]] for rank, report in found.items()}
    return _other_layouts(found) + _other_collectives(calls) + _unmatched_messages(calls)


def _other_layouts(found: dict[int, Report]) -> list[str]:
    """Return the ranks whose buckets hold other parameters, or at other places: that need not change a message."""
    layouts = {rank: json.dumps(report["layout"], sort_keys=True) for rank, report in found.items()}
    usual, _ = Counter(layouts.values()).most_common(1)[0]
    return [f"rank {rank} has other buckets" for rank, layout in layouts.items() if layout != usual]


def _other_collectives(calls: dict[int, list[tuple[Any, ...]]]) -> list[str]:
    """Return the first call of each rank that the other ranks of its groups do not make."""
    messages = set()
    groups = {rank: {call[0] for call in sequence} for rank, sequence in calls.items()}
    collective = {rank: [c for c in sequence if c[1] not in (SENDS, RECEIVES)] for rank, sequence in calls.items()}
    for shared in {frozenset(groups[a] & groups[b]) for a in calls for b in calls if a != b}:
        members = [rank for rank in calls if shared <= groups[rank]]
        sequences = {rank: tuple(call for call in collective[rank] if call[0] in shared) for rank in members}
        usual, _ = Counter(sequences.values()).most_common(1)[0]
        for rank, sequence in sequences.items():
            pairs = enumerate(zip_longest(sequence, usual, fillvalue="nothing"))
            for index, (own, other) in (pair for pair in pairs if pair[1][0] != pair[1][1]):
                messages.add(f"rank {rank} calls {own} as number {index}, others call {other}")
                break
    return sorted(messages)


def _unmatched_messages(calls: dict[int, list[tuple[Any, ...]]]) -> list[str]:
    """Return pairs of ranks of which one does not receive what the other sends, in the same order."""
    messages = []
    for sender, receiver in permutations(calls, 2):
        sent = [(c[0], *c[2:4]) for c in calls[sender] if c[1] == SENDS and c[4] == receiver]
        received = [(c[0], *c[2:4]) for c in calls[receiver] if c[1] == RECEIVES and c[4] == sender]
        if sent != received:
            messages.append(
                f"rank {sender} sends {len(sent)} messages that rank {receiver} does not receive in this order"
            )
    return messages


def test_ranks_of_a_torus_call_the_same(session: Any) -> None:
    found = reports(session, (0, 1, 4), train=TORUS)
    assert disagreements(found) == []
    assert len({call[0] for call in found[0]["collectives"]}) >= 3  # row, column, status


@pytest.mark.parametrize(
    "mutant", ["skipped_bucket", "other_order", "other_length", "other_dtype", "swapped_parameters"]
)
def test_a_rank_that_differs_is_named(session: Any, mutant: str) -> None:
    clean = reports(session, (0, 4), train=TORUS)
    broken = reports(session, (1,), train=TORUS, mutant=mutant)
    differences = disagreements(clean | broken | {2: clean[0]})
    assert differences
    assert all("rank 1 " in text for text in differences)


def test_a_missing_message_is_found(session: Any) -> None:
    clean = reports(session, (0, 1, 2), train=RING)
    assert disagreements(clean) == []
    differences = disagreements(clean | reports(session, (1,), train=RING, mutant="skipped_bucket"))
    assert len(differences) >= 2  # with either neighbour
    assert all("rank 1 " in text for text in differences)


def _wires(algorithm: str, row: str, column: str) -> dict[str, Any]:
    return {"train": {"all_reduce": {"algorithm": algorithm, "wire_row": row, "wire_column": column}}}


def _optimizer(name: str, train: dict[str, Any] = TORUS, **section: Any) -> dict[str, Any]:
    return {
        "train": {**train, "optimizer": {"name": name, **section}, "schedule": {"learning_rate": 0.01}},
    }


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize(
    "case",
    [
        *({"train": all_reduce} for all_reduce in ALL_REDUCES),
        {"train": SHARDED_TORUS, "model": {"batch_norm": {"group": 4}}},
        *({"train": all_reduce, "ranks_per_node": 8} for all_reduce in (TORUS, SHARDED_TORUS, HIERARCHICAL)),
        {"train": {"all_reduce": {"algorithm": "torus2d", "shard_over": "world"}, "weight_update": "sharded"}},
        _wires("torus2d", "bf16", "fp16"),
        _wires("torus2d", "int8", "int8"),
        _wires("hierarchical", "int8", "int8"),
        _wires("ring", "fp32", "int8"),
        _optimizer("shampoo", shampoo={"start_step": 0}),
        _optimizer("muon"),
        _optimizer("nlcg", SHARDED_TORUS),
        _optimizer("lamb", SHARDED_TORUS),
        {"train": {**SHARDED_TORUS, "ema": {"decay": 0.99}}, "evaluate": True},
        {"train": TORUS, "evaluate": True},
    ],
    ids=option_id,
)
def test_every_rank_calls_the_same(session: Any, case: dict[str, Any]) -> None:
    """Every algorithm, wire format and shard; optimizers that send messages of their own; averages and evaluations."""
    assert disagreements(reports(session, range(8), **case)) == []
