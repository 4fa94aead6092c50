"""Two axes at work at once: while one slice of a bucket crosses the columns, the next is on its way along the rows.

The phases of a slice depend on each other, the slices do not (Cho 2019, BlueConnect, pipelines the dimensions of a
network in this way). Each axis keeps one fixed order of slices, so results do not depend on timing.

Where buckets are averaged while backward goes on: strictly one after the other, in the order handed over.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from podscale.distributed.waits import waiting_for_bucket

AverageFunction = Callable[[Tensor], None]
"""Averages a bucket in place, by blocking collectives."""


class CommQueue(Protocol):
    def submit(self, bucket: Tensor) -> None:
        """Averages `bucket` in place after everything submitted before it."""
        ...

    def wait(self) -> None:
        """Everything submitted is in place for what follows; raises what a collective raised."""
        ...

    def close(self) -> None: ...


class ThreadCommQueue:
    """One thread of blocking collectives, for CPU tensors.

    Chained callbacks would not do: gloo does not order collectives issued from them, and torch aborts or, worse,
    mixes up buckets of one size.
    """

    def __init__(self, average: AverageFunction) -> None:
        self._average = average
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="all-reduce")
        self._futures: list[Future[None]] = []

    def submit(self, bucket: Tensor) -> None:
        self._futures.append(self._thread.submit(self._average_bucket, bucket, len(self._futures) + 1))

    def wait(self) -> None:
        running, self._futures = self._futures, []
        for future in running:
            future.result()

    def _average_bucket(self, bucket: Tensor, number: int) -> None:
        with waiting_for_bucket(number):
            self._average(bucket)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class StreamCommQueue:
    """A side stream, for GPU tensors: collectives queue there, after the gradients they need and before the update."""

    def __init__(self, average: AverageFunction, device: torch.device) -> None:
        self._average = average
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, bucket: Tensor) -> None:
        # Hooks run on autograd's thread, on the stream of the gradient that was just written.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._average(bucket)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        pass


def build_comm_queue(average: AverageFunction, device: torch.device) -> CommQueue:
    """The lane of a device."""
    return StreamCommQueue(average, device) if device.type == "cuda" else ThreadCommQueue(average)


SLICE_ELEMENTS = {"cpu": 2**19, "cuda": 2**21}
"""Elements of a slice at least, by device (2 and 8 MiB of fp32): smaller ones cost more latency than they hide."""
MAX_SLICES = 8
SliceOperation = Callable[[int], None]
"""Carries out one phase of the slice with this number."""


def slice_count(length: int, shape: tuple[int, int], device_type: str) -> int:
    """Slices of a bucket that go through the two axes one behind the other; one where there is one axis only."""
    return 1 if 1 in shape else max(1, min(MAX_SLICES, length // SLICE_ELEMENTS[device_type]))


class SliceQueue(Protocol):
    """A second place to work, in the order of submission."""

    def submit(self, phase: SliceOperation, number: int) -> Callable[[], object]:
        """Begins once what the caller has begun so far is done; what it returns waits for the end."""
        ...


class ThreadSliceQueue:
    """A thread that waits for CPU messages."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="all-reduce-columns")

    def submit(self, phase: SliceOperation, number: int) -> Callable[[], object]:
        future: Future[None] = self._thread.submit(phase, number)
        return future.result


class StreamSliceQueue:
    """A stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, phase: SliceOperation, number: int) -> Callable[[], object]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            phase(number)
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


def build_slice_queue(device: torch.device) -> SliceQueue:
    """The side of a device."""
    return StreamSliceQueue(device) if device.type == "cuda" else ThreadSliceQueue()


def run_pipelined(
    queue: SliceQueue, slices: int, inward: SliceOperation, across: SliceOperation, outward: SliceOperation | None
) -> None:
    """Takes every slice inward, across (beside) and outward; returns when all are done."""
    crossing: deque[Callable[[], object]] = deque()
    for number in range(slices):
        inward(number)
        crossing.append(queue.submit(across, number))
        if number:
            crossing.popleft()()
            if outward is not None:
                outward(number - 1)
    crossing.popleft()()
    if outward is not None:
        outward(slices - 1)
