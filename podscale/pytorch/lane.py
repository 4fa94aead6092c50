"""Where buckets are averaged while backward goes on: strictly one after the other, in the order handed over."""

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
