"""Serial executors for collectives: a thread for CPU tensors, a CUDA stream for GPU tensors.

A `CommQueue` averages buckets while backward is running, strictly in the order of submission.

A `SliceQueue` keeps both axes of a grid busy: while one slice of a bucket is reduced along the columns, the next is
reduced along the rows. The phases of a slice depend on each other, the slices do not (BlueConnect, Cho 2019, pipelines
the dimensions of a network like this). Each axis has one fixed order of slices, so results do not depend on timing.
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
    """Averages buckets in the order of submission."""

    def submit(self, bucket: Tensor) -> None:
        """Average `bucket` in place after all buckets submitted before it."""
        ...

    def wait(self) -> None:
        """Return when all submitted buckets are averaged (on a GPU: ordered on the current stream).

        Raises the error of a collective that failed.
        """
        ...

    def close(self) -> None: ...


class ThreadCommQueue:
    """Thread of blocking collectives, for CPU tensors.

    Chained callbacks do not work: gloo does not order collectives issued from them, so torch aborts or mixes up
    buckets of the same size.
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
    """Side stream for GPU tensors: collectives run after the gradients they need and before the optimizer step."""

    def __init__(self, average: AverageFunction, device: torch.device) -> None:
        self._average = average
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, bucket: Tensor) -> None:
        # Autograd calls the hooks in its own thread, on the stream of the gradient that was just written.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._average(bucket)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        pass


def build_comm_queue(average: AverageFunction, device: torch.device) -> CommQueue:
    """Build the queue for a device."""
    return StreamCommQueue(average, device) if device.type == "cuda" else ThreadCommQueue(average)


SLICE_ELEMENTS = {"cpu": 2**19, "cuda": 2**21}
"""Minimum length of a slice by device, elements (2 and 8 MiB of fp32): smaller ones cost more latency than they hide.
"""
MAX_SLICES = 8
SliceOperation = Callable[[int], None]
"""Runs one phase of the slice with this index."""


def slice_count(length: int, shape: tuple[int, int], device_type: str) -> int:
    """Return the number of slices of a bucket that are pipelined over the two axes; 1 if one axis has one rank.

    Args:
        length: elements of the bucket.
        shape: ranks of a row, ranks of a column.
        device_type: "cpu" or "cuda".
    """
    return 1 if 1 in shape else max(1, min(MAX_SLICES, length // SLICE_ELEMENTS[device_type]))


class SliceQueue(Protocol):
    """Executor of slice phases beside the calling thread, in the order of submission."""

    def submit(self, phase: SliceOperation, number: int) -> Callable[[], object]:
        """Run a phase after the caller's work so far. Returns a function that waits for its end."""
        ...


class ThreadSliceQueue:
    """Thread that runs slice phases, for CPU tensors."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="all-reduce-columns")

    def submit(self, phase: SliceOperation, number: int) -> Callable[[], object]:
        future: Future[None] = self._thread.submit(phase, number)
        return future.result


class StreamSliceQueue:
    """Side stream that runs slice phases, for GPU tensors."""

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
    """Build the slice queue for a device."""
    return StreamSliceQueue(device) if device.type == "cuda" else ThreadSliceQueue()


def run_pipelined(
    queue: SliceQueue, slices: int, inward: SliceOperation, across: SliceOperation, outward: SliceOperation | None
) -> None:
    """Run the phases inward, across and outward of every slice; `across` runs on the queue. Returns when all are done.

    Args:
        queue: runs `across`.
        slices: number of slices.
        inward: first phase, along the rows.
        across: second phase, along the columns.
        outward: third phase, along the rows; None if there is none.
    """
    pending: deque[Callable[[], object]] = deque()
    for number in range(slices):
        inward(number)
        pending.append(queue.submit(across, number))
        if number:
            pending.popleft()()
            if outward is not None:
                outward(number - 1)
    pending.popleft()()
    if outward is not None:
        outward(slices - 1)
