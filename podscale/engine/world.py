"""The processes of a run, as far as what both engines share must know of them."""

from typing import Protocol


class World(Protocol):
    """One process among `size`; each engine has its own, which knows its devices besides."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> range:
        """This process's devices, counted over all: its ranks of the sample order, unless devices share images."""
        ...

    @property
    def is_rank0(self) -> bool:
        """Rank 0: the one that writes."""
        ...

    @property
    def device_name(self) -> str:
        """What this process computes on, for people."""
        ...

    def hosts(self) -> tuple[str, ...]:
        """The machine of every process, by name. Every process must call this at the same time."""
        ...
