"""Message plans of collectives along an axis: who sends what when, and in which order sums are taken. Pure data.

Positions 0 .. size-1 are the ranks along one axis. In low precision the order of a sum decides its error, so it is
defined once, here; tests hold the real worlds to it bit for bit.

A plan is made once for each length. Its rounds match across positions: what one sends in round t another receives in
its round t. A round's sends carry the results of earlier rounds, but may be sent `slack` rounds early, since data that
old is complete; so links do not idle while a rank adds.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

Span = tuple[int, int]
"""[start, stop) in elements."""


def equal_spans(length: int, parts: int, start: int = 0) -> list[Span]:
    """Cut `length` elements into equal parts. If they do not divide, the last parts are shorter or empty."""
    share = -(-length // parts)
    edges = [start + min(part * share, length) for part in range(parts + 1)]
    return list(pairwise(edges))


def ring_part(position: int, step: int, size: int) -> int:
    """Return the part that `position` sends at `step` of a ring reduce-scatter (0 <= step < size - 1).

    Part p starts at position p + 1, travels once around and is complete at position p: the sum is a chain in that
    order.
    """
    return (position - 1 - step) % size


def ring_chain(part: int, size: int) -> list[int]:
    """Return the positions in the order in which a ring adds them to `part`."""
    return [(part + 1 + step) % size for step in range(size)]


def row_chain(size: int) -> list[int]:
    """Return the positions in the order in which a chain that ends at position 0 adds them."""
    return list(range(size - 1, -1, -1))


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
    while half and right > size:  # a missing right child is replaced by its nearest left descendant
        half //= 2
        right -= half
    return [node - lowest - 1, right - 1] if half else [node - lowest - 1]


def mirror_position(position: int, size: int) -> int:
    """Renumber positions so that leaves of the tree become inner nodes; its own inverse if size is even.

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

    It takes size - 1 steps and (size - 1)/size of the data per link and direction. Parts travel in segments of
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
    """Plan the rounds of a ring.

    Args:
        steps: index of the part sent and of the part received in each step.
    """
    size = len(parts)
    after, before = (position + 1) % size, (position - 1) % size
    count = max(-(-(stop - start) // segment) for start, stop in parts)
    rounds = []
    for sent, received in steps:
        for number in range(count):
            sends = [Send(after, *span) for span in _segment_of_part(parts[sent], number, segment)]
            receives = [Receive(before, *span, adds) for span in _segment_of_part(parts[received], number, segment)]
            rounds.append(Round(tuple(sends), tuple(receives)))
    return MessagePlan(tuple(rounds), count - 1)


def _segment_of_part(part: Span, number: int, segment: int) -> Iterator[Span]:
    """Yield segment `number` of a part, if the part is that long."""
    start = part[0] + number * segment
    if start < part[1]:
        yield start, min(start + segment, part[1])


@cache
def chain_reduce(position: int, size: int, length: int, segment: int) -> MessagePlan:
    """Plan a chain reduce: position 0 holds the sum afterwards. Segments go along size-1, .., 1, 0 in a pipeline."""
    pieces = segment_spans(length, segment)
    rounds = []
    for time in range(len(pieces) + size - 2):
        out, into = time - (size - 1 - position), time - (size - 2 - position)
        sends = [Send(position - 1, *pieces[out])] if position > 0 and 0 <= out < len(pieces) else []
        comes = position < size - 1 and 0 <= into < len(pieces)
        rounds.append(Round(tuple(sends), (Receive(position + 1, *pieces[into], True),) if comes else ()))
    return MessagePlan(tuple(rounds), 0)


@cache
def chain_broadcast(position: int, size: int, length: int, segment: int) -> MessagePlan:
    """Plan a chain broadcast from position 0. Segments go along 0, 1, .., size-1 in a pipeline."""
    pieces = segment_spans(length, segment)
    rounds = []
    for time in range(len(pieces) + size - 2):
        out, into = time - position, time - position + 1
        sends = [Send(position + 1, *pieces[out])] if position < size - 1 and 0 <= out < len(pieces) else []
        comes = position > 0 and 0 <= into < len(pieces)
        rounds.append(Round(tuple(sends), (Receive(position - 1, *pieces[into], False),) if comes else ()))
    return MessagePlan(tuple(rounds), 0)


@cache
def double_tree(position: int, size: int, length: int, segment: int) -> MessagePlan:
    """Plan an all-reduce by two binary trees: up to the roots and down again, in a pipeline.

    The first tree takes the first half of the data in the even rounds. The second one, renumbered so that leaves and
    inner nodes change roles, takes the other half in the odd rounds. It takes about 2 log2(size) + segments steps; each
    position sends and receives at most twice the data.
    """
    halves = equal_spans(length, 2)
    both = zip(halves, (False, True), strict=True)
    trees = [_tree_rounds(position, size, half, segment, renumber) for half, renumber in both]
    longest = max(map(len, trees))
    rounds = [tree[time] if time < len(tree) else Round((), ()) for time in range(longest) for tree in trees]
    return MessagePlan(tuple(rounds), 1)


def _tree_rounds(position: int, size: int, part: Span, segment: int, renumber: bool) -> list[Round]:
    """Plan one tree: in round t of a node at depth d, piece t - (height - d) goes up, piece t - height - d down."""
    number = {p: mirror_position(p, size) if renumber else p for p in range(size)}
    at = {node: p for p, node in number.items()}
    node = number[position]
    above = tree_parent(node, size)
    parent = None if above is None else at[above]
    children = [at[child] for child in tree_children(node, size)]
    depth, height = _tree_depth(node, size), max(_tree_depth(other, size) for other in range(size))
    pieces = segment_spans(part[1] - part[0], segment, part[0])

    def piece(index: int) -> list[Span]:
        return [pieces[index]] if 0 <= index < len(pieces) else []

    rounds = []
    for time in range(len(pieces) + 2 * height - 1 if pieces else 0):
        sends = [Send(parent, *span) for span in piece(time - height + depth) if parent is not None]
        sends += [Send(child, *span) for child in children for span in piece(time - height - depth)]
        receives = [Receive(child, *s, True) for child in children for s in piece(time - height + depth + 1)]
        receives += [Receive(parent, *s, False) for s in piece(time - height - depth + 1) if parent is not None]
        rounds.append(Round(tuple(sends), tuple(receives)))
    return rounds


def _tree_depth(node: int, size: int) -> int:
    parent = tree_parent(node, size)
    return 0 if parent is None else 1 + _tree_depth(parent, size)


def segment_spans(length: int, segment: int, start: int = 0) -> list[Span]:
    """Cut `length` elements into segments. The last one may be shorter."""
    return [(low, min(low + segment, start + length)) for low in range(start, start + length, segment)]
