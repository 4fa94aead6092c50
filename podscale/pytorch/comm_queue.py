"""Serial executor of collectives beside the calling thread, and a pipeline of two phases on top of it.

A `CommQueue` is a thread for CPU tensors and a CUDA stream for GPU tensors. Three parts use it: the reducer averages
buckets while backward is running, the DDP hook averages DDP's buckets, and `run_pipelined` keeps both axes of a grid
busy. While one slice of a bucket is reduced along the columns, the next is reduced along the rows (BlueConnect, Cho
2019). Each queue runs its operations in the order of submission, so results do not depend on timing.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch

Wait = Callable[[], object]
"""Waits for one operation (on a GPU: orders the current stream after it) and raises its error."""


class CommQueue(Protocol):
    """Queue that runs blocking collectives one after the other, in the order of submission."""

    def submit(self, operation: Callable[[], None]) -> Wait:
        """Run `operation` after the caller's work so far and after all operations submitted before."""
        ...

    def close(self) -> None: ...


class ThreadCommQueue:
    """Thread of blocking collectives, for CPU tensors.

    Chained callbacks do not work: gloo does not order collectives issued from them, so torch aborts or mixes up
    buckets of the same size.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, operation: Callable[[], None]) -> Wait:
        return self._thread.submit(operation).result

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class StreamCommQueue:
    """Side stream for GPU tensors. The host does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, operation: Callable[[], None]) -> Wait:
        # Autograd calls the hooks in its own thread, on the stream of the gradient that was just written.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            operation()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)

    def close(self) -> None:
        pass


def build_comm_queue(device: torch.device, name: str = "all-reduce") -> CommQueue:
    """Build the queue for a device; `name` is that of the thread."""
    return StreamCommQueue(device) if device.type == "cuda" else ThreadCommQueue(name)


SLICE_ELEMENTS = {"cpu": 2**19, "cuda": 2**21}
"""Minimum length of a slice by device, elements (2 and 8 MiB of fp32): shorter ones cost more than they hide."""
MAX_SLICES = 8
SlicePhase = Callable[[int], None]
"""Runs one phase of the slice with this index."""


def slice_count(length: int, shape: tuple[int, int], device_type: str) -> int:
    """Return the number of slices of a bucket that are pipelined over the axes of `shape`; 1 if one has one rank."""
    return 1 if 1 in shape else max(1, min(MAX_SLICES, length // SLICE_ELEMENTS[device_type]))


def run_pipelined(
    column_queue: CommQueue, slices: int, inward: SlicePhase, across: SlicePhase, outward: SlicePhase | None
) -> None:
    """Run three phases of every slice: `inward` along the rows, `across` on the queue of the columns, `outward`.

    The phases of a slice depend on each other, the slices do not. Returns when all are done.
    """
    waits: list[Wait] = []
    for number in range(slices + 1):
        if number < slices:
            inward(number)
            waits.append(column_queue.submit(partial(across, number)))
        if number:
            waits[number - 1]()
            if outward is not None:
                outward(number - 1)
