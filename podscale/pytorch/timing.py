"""Timers of a step's phases on the device, without waiting for it, and of operations of all ranks."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

import torch
from torch import distributed as dist

from podscale.pytorch.world import World

TimeMark = float | torch.cuda.Event
"""Time of the host in seconds, or an event on the current stream of a GPU."""


def record_mark(*, on_gpu: bool) -> TimeMark:
    """Return the present position in the device's queue (on a CPU: the time)."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: TimeMark, end: TimeMark) -> float:
    """Return the seconds from one mark to a later one; on a GPU both must have passed."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) / 1000.0
    assert isinstance(end, float)
    return end - begin


def median_seconds(run: Callable[[], object], device: torch.device, *, warmups: int, repeats: int) -> float:
    """Return the median seconds of `run` on a device, queued `repeats` times behind `warmups` that do not count."""
    on_gpu = device.type == "cuda"
    for _ in range(warmups):
        run()
    marks = [record_mark(on_gpu=on_gpu)]
    for _ in range(repeats):
        run()
        marks.append(record_mark(on_gpu=on_gpu))
    if on_gpu:
        torch.cuda.synchronize(device)
    return median(seconds_between(begin, end) for begin, end in pairwise(marks))


class DeviceTimer:
    """Seconds by part of the steps measured since `clear`. A nested part counts in both."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._intervals: list[tuple[str, TimeMark, TimeMark]] = []

    @contextmanager
    def time_part(self, name: str) -> Iterator[None]:
        begin = record_mark(on_gpu=self._on_gpu)
        try:
            yield
        finally:
            self._intervals.append((name, begin, record_mark(on_gpu=self._on_gpu)))

    def clear(self) -> None:
        self._intervals = []

    @property
    def is_ready(self) -> bool:
        """True if the device has passed every mark."""
        return all(not isinstance(end, torch.cuda.Event) or end.query() for _, _, end in self._intervals)

    def seconds(self) -> dict[str, float]:
        """Return the sums by part, in the order in which parts first ended. Call it only if `is_ready`."""
        sums: dict[str, float] = defaultdict(float)
        for name, begin, end in self._intervals:
            sums[name] += seconds_between(begin, end)
        return dict(sums)


def time_slowest_rank(world: World, operation: Callable[[], None]) -> float:
    """Return the seconds from a common start until the slowest rank has finished."""
    world.barrier()
    begin = time.perf_counter()
    operation()
    if world.on_gpu:
        torch.cuda.synchronize(world.device)
    slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
