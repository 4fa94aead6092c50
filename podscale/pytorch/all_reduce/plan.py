"""Message plans of collectives along an axis: sender, receiver and elements of every message, as pure data.

Positions 0 .. size-1 are the ranks along one axis. A plan also fixes the order of each sum, which decides its error in
low precision; tests compare the results of real process groups with it bit for bit.

A plan is made once for each length. Its rounds match across positions: what one position sends in round t, another
receives in its round t. A send in round t needs only what was received up to round t - slack - 1, so it may be posted
`slack` rounds early. Links then do not idle while a rank adds.
"""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

Span = tuple[int, int]
"""[start, stop) in elements."""


def equal_spans(length: int, parts: int, start: int = 0) -> list[Span]:
    """Cut `length` elements from `start` on into equal spans. If they do not divide, the last are shorter or empty."""
    part_length = -(-length // parts)
    edges = [start + min(part * part_length, length) for part in range(parts + 1)]
    return list(pairwise(edges))


def ring_part(position: int, step: int, size: int) -> int:
    """Return the part that `position` sends at `step` of a ring reduce-scatter (0 <= step < size - 1).

    Part p starts at position p + 1 and ends at position p.
    """
    return (position - 1 - step) % size


def tree_parent(position: int, size: int) -> int | None:
    """Return the parent of a position in a binary tree whose in-order walk is 0, 1, 2, ...; None for the root.

    Numbered from 1, a node of height h is an odd multiple of 2^h. Ancestors beyond the last position are skipped.
    """
    node = position + 1
    bit = node & -node
    while bit <= size:
        node, bit = (node - bit) | (2 * bit), 2 * bit
        if node <= size:
            return node - 1
    return None


def tree_children(position: int, size: int) -> list[int]:
    """Return the children of a position, at most two, in the order in which it adds them."""
    node = position + 1
    half = lowest = (node & -node) // 2
    if not half:
        return []
    right = node + half
    while half and right > size:  # the nearest left descendant replaces a missing right child
        half //= 2
        right -= half
    return [node - lowest - 1, right - 1] if half else [node - lowest - 1]


def mirror_position(position: int, size: int) -> int:
    """Renumber a position so that leaves of the tree become inner nodes; its own inverse if size is even.

    Two trees, one of them renumbered, with half the data each keep every link busy (Sanders 2009, two-tree algorithms).
    """
    return size - 1 - position if size % 2 == 0 else (position + 1) % size


class Send(NamedTuple):
    """Send elements [start, stop) to position `peer`."""

    peer: int
    start: int
    stop: int


class Receive(NamedTuple):
    """Receive elements [start, stop) from position `peer`; add them if `adds`, else replace."""

    peer: int
    start: int
    stop: int
    adds: bool


class Round(NamedTuple):
    """Messages of one position in one round."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


class MessagePlan(NamedTuple):
    """Rounds of one position; a send may run `slack` rounds early."""

    rounds: tuple[Round, ...]
    slack: int


@cache
def ring_reduce_scatter(position: int, parts: tuple[Span, ...], segment: int) -> MessagePlan:
    """Plan a ring reduce-scatter: parts[position] holds the sum afterwards.

    It takes size - 1 steps, and each position sends (size - 1)/size of the data. Parts are sent in segments of
    `segment` elements: while one is added, the next is in flight.
    """
    size = len(parts)
    steps = [(ring_part(position, step, size), ring_part(position - 1, step, size)) for step in range(size - 1)]
    return _ring_plan(position, parts, segment, steps, adds=True)


@cache
def ring_all_gather(position: int, parts: tuple[Span, ...], segment: int) -> MessagePlan:
    """Plan a ring all-gather: every position holds every part afterwards. Steps and data as in the reduce-scatter."""
    size = len(parts)
    steps = [((position - s) % size, (position - 1 - s) % size) for s in range(size - 1)]
    return _ring_plan(position, parts, segment, steps, adds=False)


def _ring_plan(
    position: int, parts: tuple[Span, ...], segment: int, steps: list[tuple[int, int]], *, adds: bool
) -> MessagePlan:
    """Plan the rounds of a ring. `steps` has the indices of the part sent and of the part received in each step."""
    size = len(parts)
    after, before = (position + 1) % size, (position - 1) % size
    segments = [segment_spans(stop - start, segment, start) for start, stop in parts]
    count = max(map(len, segments))
    rounds = []
    for sent, received in steps:
        for number in range(count):
            sends = [Send(after, *span) for span in _span_at(segments[sent], number)]
            receives = [Receive(before, *span, adds) for span in _span_at(segments[received], number)]
            rounds.append(Round(tuple(sends), tuple(receives)))
    return MessagePlan(tuple(rounds), count - 1)


@cache
def chain_reduce(position: int, size: int, length: int, segment: int) -> MessagePlan:
    """Plan a chain reduce: position 0 holds the sum afterwards. Segments go along size-1, .., 1, 0 in a pipeline."""
    hops = size - 1 - position  # from the start of the chain to this position
    return _chain_plan(segment_spans(length, segment), hops, size, position + 1, position - 1, adds=True)


@cache
def chain_broadcast(position: int, size: int, length: int, segment: int) -> MessagePlan:
    """Plan a chain broadcast from position 0. Segments go along 0, 1, .., size-1 in a pipeline."""
    return _chain_plan(segment_spans(length, segment), position, size, position - 1, position + 1, adds=False)


def _chain_plan(segments: list[Span], hops: int, size: int, before: int, after: int, *, adds: bool) -> MessagePlan:
    """Plan a position of a chain, `hops` behind its start, that receives from `before` and sends to `after`."""
    rounds = []
    for time in range(len(segments) + size - 2):
        sends = [Send(after, *span) for span in _span_at(segments, time - hops) if hops < size - 1]
        receives = [Receive(before, *span, adds) for span in _span_at(segments, time - hops + 1) if hops > 0]
        rounds.append(Round(tuple(sends), tuple(receives)))
    return MessagePlan(tuple(rounds), 0)


@cache
def double_tree(position: int, size: int, length: int, segment: int) -> MessagePlan:
    """Plan an all-reduce by two binary trees: up to the roots and down again, in a pipeline.

    The first tree takes the first half of the data in the even rounds. The second one, renumbered so that leaves and
    inner nodes change roles, takes the other half in the odd rounds. It takes about 2 log2(size) + segments rounds per
    tree; each position sends and receives at most twice the data.
    """
    halves = equal_spans(length, 2)
    both = zip(halves, (False, True), strict=True)
    trees = [_tree_rounds(position, size, half, segment, renumber) for half, renumber in both]
    longest = max(map(len, trees))
    rounds = [tree[time] if time < len(tree) else Round((), ()) for time in range(longest) for tree in trees]
    return MessagePlan(tuple(rounds), 1)


def _tree_rounds(position: int, size: int, part: Span, segment: int, renumber: bool) -> list[Round]:
    """Plan one tree: in round t of a node at depth d, segment t - (height - d) goes up, segment t - height - d down."""
    node_of = {p: mirror_position(p, size) if renumber else p for p in range(size)}
    position_of = {node: p for p, node in node_of.items()}
    node = node_of[position]
    parent_node = tree_parent(node, size)
    parents = [] if parent_node is None else [position_of[parent_node]]
    children = [position_of[child] for child in tree_children(node, size)]
    depth, height = _tree_depth(node, size), max(_tree_depth(other, size) for other in range(size))
    segments = segment_spans(part[1] - part[0], segment, part[0])
    rounds = []
    for time in range(len(segments) + 2 * height - 1 if segments else 0):
        up, down = time - height + depth, time - height - depth
        sends = [Send(parent, *span) for parent in parents for span in _span_at(segments, up)]
        sends += [Send(child, *span) for child in children for span in _span_at(segments, down)]
        receives = [Receive(child, *span, True) for child in children for span in _span_at(segments, up + 1)]
        receives += [Receive(parent, *span, False) for parent in parents for span in _span_at(segments, down + 1)]
        rounds.append(Round(tuple(sends), tuple(receives)))
    return rounds


def _tree_depth(node: int, size: int) -> int:
    parent = tree_parent(node, size)
    return 0 if parent is None else 1 + _tree_depth(parent, size)


def segment_spans(length: int, segment: int, start: int = 0) -> list[Span]:
    """Cut `length` elements into segments. The last one may be shorter."""
    return [(low, min(low + segment, start + length)) for low in range(start, start + length, segment)]


def _span_at(segments: list[Span], number: int) -> list[Span]:
    """Return segment `number` as a list, empty if there is no such segment."""
    return [segments[number]] if 0 <= number < len(segments) else []
