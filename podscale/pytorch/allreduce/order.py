"""Who adds what when, as plain arithmetic on places: the one description behind the messages and the simulations.

Places 0 .. size-1 are the ranks along one axis. In low precision the order of a sum decides its error, so the order
is stated once, here, and tests hold the real worlds to it bit for bit.
"""

from itertools import pairwise

Span = tuple[int, int]
"""[start, stop) in elements."""


def equal_spans(length: int, parts: int, start: int = 0) -> list[Span]:
    """Cuts `length` elements into equal parts; where they do not divide, the last ones are shorter or empty."""
    share = -(-length // parts)
    edges = [start + min(part * share, length) for part in range(parts + 1)]
    return list(pairwise(edges))


def ring_part(position: int, step: int, size: int) -> int:
    """The part that `place` passes on at `step` of a ring reduce-scatter (0 <= step < size - 1).

    So part p starts at place p + 1, travels once around and is whole at place p: the sum is a chain in that order.
    """
    return (position - 1 - step) % size


def ring_chain(part: int, size: int) -> list[int]:
    """The places in the order in which a ring adds them to `part`."""
    return [(part + 1 + step) % size for step in range(size)]


def row_chain(size: int) -> list[int]:
    """The places in the order in which a chain that ends at place 0 adds them."""
    return list(range(size - 1, -1, -1))


def tree_parent(position: int, size: int) -> int | None:
    """The parent of a place in a binary tree whose in-order walk is 0, 1, 2, ...; None for the root.

    Numbered from 1, a node of height h is an odd multiple of 2^h; ancestors beyond the last place are left out.
    """
    node = position + 1
    bit = node & -node
    while bit <= size:
        node, bit = (node - bit) | (2 * bit), 2 * bit
        if node <= size:
            return node - 1
    return None


def tree_children(position: int, size: int) -> list[int]:
    """The children of a place, at most two, in the order in which it adds them."""
    node = position + 1
    half = lowest = (node & -node) // 2
    if not half:
        return []
    right = node + half
    while half and right > size:  # in place of a right child that is not there stands its nearest left descendant
        half //= 2
        right -= half
    return [node - lowest - 1, right - 1] if half else [node - lowest - 1]


def mirror_position(position: int, size: int) -> int:
    """A renumbering (its own inverse where size is even) after which leaves of the tree become inner nodes.

    Two trees, one renumbered, with half the data each keep every link busy (Sanders 2009, two-tree algorithms).
    """
    return size - 1 - position if size % 2 == 0 else (position + 1) % size
