"""Uniform random sample of a stream of unknown length."""

import random
from typing import Generic, TypeVar

T = TypeVar("T")


class Reservoir(Generic[T]):
    """At most `size` of the items that were added, each with the same probability (Vitter 1985, algorithm R).

    The sample is the same for the same stream. Memory is for `size` items.
    """

    def __init__(self, size: int) -> None:
        self.items: list[T] = []
        self._size, self._added = size, 0
        self._random = random.Random(0)

    def add(self, item: T) -> None:
        self._added += 1
        if self._added <= self._size:
            self.items.append(item)
        elif (place := self._random.randrange(self._added)) < self._size:
            self.items[place] = item
