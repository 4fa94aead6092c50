"""Message plans, run for all positions in one process: sends match receives, sums are right, early sends are safe."""

from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from podscale.pytorch.all_reduce.plan import (
    MessagePlan,
    chain_broadcast,
    chain_reduce,
    double_tree,
    equal_spans,
    mirror_position,
    ring_all_gather,
    ring_part,
    ring_reduce_scatter,
    tree_children,
    tree_parent,
)
from podscale.pytorch.all_reduce.wire_formats import FP32
from tests.support import reduction

SIZES = range(1, 10)
CASES = [(length, segment) for length in (1, 2, 7, 40, 101) for segment in (3, 16, 1000)]


def run_plans(plans: list[MessagePlan], buffers: list[Tensor], *, eager: bool) -> None:
    """Run the plans of all positions in lockstep; if `eager`, with every send as early as its plan allows."""
    count = len(plans[0].rounds)
    assert all(len(plan.rounds) == count for plan in plans)
    sent: list[deque[tuple[int, int, int, Tensor]]] = [deque() for _ in plans]  # by receiver: sender, span, content
    done = [0] * len(plans)
    for number in range(count):
        for position, plan in enumerate(plans):
            until = min(number + (plan.slack if eager else 0) + 1, count)
            for one in plan.rounds[done[position] : until]:
                for peer, start, stop in one.sends:
                    sent[peer].append((position, start, stop, buffers[position][start:stop].clone()))
            done[position] = max(done[position], until)
        for position, plan in enumerate(plans):
            for peer, start, stop, adds in plan.rounds[number].receives:
                message = next(m for m in sent[position] if m[0] == peer)  # in order of sending, as gloo and NCCL do
                assert message[1:3] == (start, stop)
                sent[position].remove(message)
                target = buffers[position][start:stop]
                _ = target.add_(message[3]) if adds else target.copy_(message[3])
    assert not any(sent), "messages that were not received"


def contributions(size: int, length: int) -> list[Tensor]:
    return [torch.randn(length, generator=torch.Generator().manual_seed(position)) for position in range(size)]


Planner = Callable[[int], MessagePlan]


def outcome(size: int, length: int, planners: list[Planner], *, eager: bool) -> list[Tensor]:
    buffers = contributions(size, length)
    for planner in planners:
        run_plans([planner(position) for position in range(size)], buffers, eager=eager)
    return buffers


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("length", "segment"), CASES)
def test_plans_add_in_the_stated_order(length: int, segment: int, eager: bool) -> None:
    for size in SIZES:
        parts, values = tuple(equal_spans(length, size)), contributions(size, length)
        scatter: Planner = partial(ring_reduce_scatter, parts=parts, segment=segment)
        gather: Planner = partial(ring_all_gather, parts=parts, segment=segment)
        shape = {"size": size, "length": length, "segment": segment}
        scattered = outcome(size, length, [scatter], eager=eager)
        mine = torch.cat([scattered[position][start:stop] for position, (start, stop) in enumerate(parts)])
        assert torch.equal(mine, reduction.ring_shards(values, FP32))
        for planners, want in (
            ([scatter, gather], reduction.ring(values, FP32)),
            ([partial(double_tree, **shape)], reduction.double_tree(values, FP32)),
            (
                [partial(chain_reduce, **shape), partial(chain_broadcast, **shape)],
                reduction.hierarchical(values, size, FP32, lambda one: one[0]),
            ),
        ):
            assert all(torch.equal(buffer, want) for buffer in outcome(size, length, planners, eager=eager))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 31, 32, 100, 1024])
def test_rings_visit_all_positions_and_trees_are_binary_and_balanced(size: int) -> None:
    for part in {0, 1 % size, size - 1}:
        ring = reduction.ring_order(part, size)
        assert sorted(ring) == list(range(size))
        assert ring[-1] == part
        assert [ring_part(position, step, size) for step, position in enumerate(ring[:-1])] == [part] * (size - 1)
    parents = [tree_parent(position, size) for position in range(size)]
    assert parents.count(None) == 1
    for position in range(size):
        children = tree_children(position, size)
        assert len(children) <= 2
        assert children == [child for child in children if parents[child] == position]
    assert sum(len(tree_children(position, size)) for position in range(size)) == size - 1
    for start in range(size):
        position, steps = start, 0
        while (above := parents[position]) is not None:
            position, steps = above, steps + 1
        assert steps <= size.bit_length() - 1
    assert sorted(mirror_position(position, size) for position in range(size)) == list(range(size))
    inner = {parent for parent in parents if parent is not None}
    twice = sum(mirror_position(position, size) in inner and position in inner for position in range(size))
    assert twice <= 1, "an inner node of both trees sends more than the other positions"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_link_carries_more_than_its_bound(size: int) -> None:
    length, segment = 64 * size, 8
    parts = tuple(equal_spans(length, size))
    for position in range(size):
        plans = [ring_reduce_scatter(position, parts, segment), ring_all_gather(position, parts, segment)]
        assert sum(volume(plan) for plan in plans) == 2 * (size - 1) * length // size
        assert volume(double_tree(position, size, length, segment)) <= 2 * length
        assert volume(chain_reduce(position, size, length, segment)) <= length


def volume(plan: MessagePlan) -> int:
    """Return the number of elements sent."""
    return sum(stop - start for one in plan.rounds for _, start, stop in one.sends)
