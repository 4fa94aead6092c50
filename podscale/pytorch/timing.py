"""Times of the parts of an update on the device itself, taken without waiting for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from podscale.pytorch.world import World


class DeviceTimes:
    """Seconds by part of the updates measured since `clear`; on a CPU the host's own times.

    On a GPU an event is recorded on the current stream before and after each part. A part inside another counts in
    both.
    """

    def __init__(self, world: World) -> None:
        self._on_gpu = world.on_gpu
        self._marks: list[tuple[str, _Mark, _Mark]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = self._mark()
        try:
            yield
        finally:
            self._marks.append((name, begin, self._mark()))

    def clear(self) -> None:
        self._marks = []

    @property
    def ready(self) -> bool:
        """Whether the device has passed every mark."""
        return all(not isinstance(end, torch.cuda.Event) or end.query() for _, _, end in self._marks)

    def seconds(self) -> dict[str, float]:
        """Sums by part, in the order of their first appearance; call it once `ready`."""
        found: dict[str, float] = {}
        for name, begin, end in self._marks:
            found[name] = found.get(name, 0.0) + _between(begin, end)
        return found

    def _mark(self) -> "_Mark":
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_Mark = float | torch.cuda.Event


def _between(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) / 1000.0
    assert isinstance(end, float)
    return end - begin
