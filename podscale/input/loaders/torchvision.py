"""The reference loader: torchvision's transforms on PIL images, bit for bit, by a pool of threads.

Threads, because decoding and resizing release the interpreter's lock: nothing is copied between processes, images are
written straight into their batch, and no worker can be left behind by a rank that is killed.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from podscale.input.batch import Batch
from podscale.input.crop import Views
from podscale.input.decode import BadRecord, Pixels, cut, decode
from podscale.input.guard import Guard
from podscale.input.request import Request, Requests
from podscale.shards.shardset import Split

_CHUNK = 4  # images of one task: small enough to share a batch evenly, large enough to make a task worth its queue


class ShardDataset:
    """A map-style dataset (the protocol of torch.utils.data) of decoded images: (uint8 [h, w, 3], class index)."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, row: int) -> tuple[Pixels, int]:
        """Raises BadRecord where the bytes are no image, or not the one that the index describes."""
        pixels = decode(self.split.record(row))
        height, width = int(self.split.column("height")[row]), int(self.split.column("width")[row])
        if pixels.shape[:2] != (height, width):
            raise BadRecord(f"the image has {pixels.shape[1]}x{pixels.shape[0]} px, the index says {width}x{height}")
        return pixels, int(self.split.labels[row])


class _Pending:
    """A batch being filled."""

    def __init__(self, request: Request, views: Views, size: int) -> None:
        self.request, self.views = request, views
        self.images: Pixels = np.empty((len(request.rows), size, size, 3), dtype=np.uint8)
        self.images[request.real :] = 0
        self.rows: npt.NDArray[np.int64] = request.rows.copy()
        self.tasks: list[Future[None]] = []


class TorchvisionLoader:
    """Decodes with `workers` threads, `prefetch` batches ahead of the one handed over."""

    def __init__(self, requests: Requests, guard: Guard, *, workers: int, prefetch: int) -> None:
        self._requests, self._guard, self._prefetch = requests, guard, prefetch
        self._dataset = ShardDataset(requests.split)
        self._window: deque[_Pending] = deque()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="podscale-decode")

    @property
    def bad_records(self) -> int:
        return self._guard.bad_records

    @property
    def ready(self) -> int:
        return sum(all(task.done() for task in pending.tasks) for pending in tuple(self._window))

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        window = self._window = deque[_Pending]()
        try:
            for step in range(start, stop):
                while len(window) <= self._prefetch and step + len(window) < stop:
                    window.append(self._begin(step + len(window)))
                yield self._finish(window.popleft())
        finally:
            for pending in window:
                for task in pending.tasks:
                    task.cancel()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self, step: int) -> _Pending:
        request = self._requests.at(step)
        views = self._requests.views(step, request.rows, request.epochs)
        pending = _Pending(request, views, self._requests.size)
        for begin in range(0, pending.request.real, _CHUNK):
            part = range(begin, min(begin + _CHUNK, pending.request.real))
            pending.tasks.append(self._pool.submit(self._fill, pending, part))
        return pending

    def _finish(self, pending: _Pending) -> Batch:
        for task in pending.tasks:
            task.result()
        return self._requests.answer(replace(pending.request, rows=pending.rows), pending.images)

    def _fill(self, pending: _Pending, part: range) -> None:
        request, size = pending.request, self._requests.size
        for slot in part:
            row, pixels = self._usable(int(request.rows[slot]), int(request.epochs[slot]))
            view = pending.views[slot]
            if row != request.rows[slot]:
                pending.rows[slot] = row
                one = slice(slot, slot + 1)
                view = self._requests.views(request.step, pending.rows[one], request.epochs[one])[0]
            pending.images[slot] = cut(pixels, view, size)

    def _usable(self, row: int, epoch: int) -> tuple[int, Pixels]:
        """The row, or the one that takes its place, and its pixels."""
        while True:
            row = self._guard.substitute(row, epoch)
            try:
                return row, self._dataset[row][0]
            except BadRecord as error:
                self._guard.report(row, epoch, str(error))
