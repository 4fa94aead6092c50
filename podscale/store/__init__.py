"""The small key-value store that all ranks of a run reach, as both engines use it."""

from collections.abc import Sequence
from typing import Protocol

FAILED_KEY = "pulse/failed"
"""Key: which rank was the first to fail by itself, by its own word or that of the process that started it."""


class StoreError(Exception):
    """The store cannot be reached (any more)."""


class StoreTimeout(StoreError):
    """What was waited for did not come in time."""


class Store(Protocol):
    """Texts by their names, the same for every rank.

    It is that of `server`, or torchrun's where that has started the ranks (pytorch.meeting). Every call raises
    StoreError where the store is gone, after the store's patience at the latest.
    """

    def set(self, key: str, value: str) -> None:
        """Writes a value, over an older one."""

    def get(self, keys: Sequence[str]) -> list[str]:
        """The values of the keys, each as soon as there is one; StoreTimeout after the store's patience."""

    def wait(self, keys: Sequence[str], seconds: float) -> None:
        """Returns when every key has a value; StoreTimeout after `seconds`."""

    def has(self, key: str) -> bool:
        """Whether the key has a value."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which begins at 0; its new value. A counter is no key of the other calls."""

    def clone(self, timeout_seconds: float) -> "Store":
        """The same store for another thread, with `seconds` of patience."""
