"""Dynamic batching: one thread owns the model and predicts the images that wait for it, together."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt

from podscale.data.decode import Pixels
from podscale.prediction.model import Classifier
from podscale.serving.metrics import ServingMetrics

STUCK_SECONDS = 120.0
"""Time after which a batch that does not end makes the process unhealthy."""
MAX_FAILED_BATCHES = 3
"""Failed batches in a row that make the process unhealthy; after a CUDA error, all further batches fail."""

LogProbabilities = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Image in the queue: pixels uint8 [size, size, 3], its future, and the time of its arrival."""

    pixels: Pixels
    result: "asyncio.Future[LogProbabilities]"
    arrived: float


class Batcher:
    """Model in its own thread. `start` loads it, and predicts two batches of zeros before the first image.

    A batch takes at most `max_batch` images, and waits at most `max_wait` after the arrival of its first image. If the
    model was busy for longer, the batch starts at once with the images that have arrived meanwhile.

    Args:
        load: loads the model; called in the model's thread.
        size: side of the images, pixels.
        max_wait: seconds.
    """

    def __init__(
        self, load: Callable[[], Classifier], size: int, max_batch: int, max_wait: float, metrics: ServingMetrics
    ) -> None:
        self._load, self._size, self._max_batch, self._max_wait = load, size, max_batch, max_wait
        self._metrics = metrics
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="podscale-model")
        self._loop: asyncio.AbstractEventLoop
        self._batch_started: float | None = None
        self._failed_batches = 0
        self._is_closed = False
        self.is_ready = False
        self.error: BaseException | None = None
        """Error of loading the model or of the first batch."""

    @property
    def waiting(self) -> int:
        """Images that wait for the model."""
        return self._queue.qsize()

    @property
    def is_healthy(self) -> bool:
        """False if the model's thread has ended, a batch does not end, or batches only fail."""
        started = self._batch_started
        is_stuck = started is not None and time.monotonic() - started > STUCK_SECONDS
        return self._thread.is_alive() and not is_stuck and self._failed_batches < MAX_FAILED_BATCHES

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def close(self) -> None:
        """Stop after the images in the queue, or after loading, and wait until the thread has ended.

        The process must not exit before: PyTorch aborts it if a thread is inside its libraries.
        """
        self._is_closed = True
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, pixels: Pixels) -> "asyncio.Future[LogProbabilities]":
        """Return the future log-probabilities of an image, float32 [classes]; called on the event loop's thread."""
        result: asyncio.Future[LogProbabilities] = self._loop.create_future()
        self._queue.put(_Waiting(pixels, result, time.monotonic()))
        return result

    def _run(self) -> None:
        try:
            classifier = self._load()
            for images in () if self._is_closed else sorted({1, self._max_batch}):
                classifier.log_probabilities(np.zeros((images, self._size, self._size, 3), np.uint8))
        except BaseException as error:  # handed to the thread of the server
            self.error = error
            return
        self.is_ready = True
        while batch := self._next_batch():
            self._predict(classifier, batch)

    def _next_batch(self) -> list[_Waiting]:
        """Wait for the next batch; it is empty after `close`."""
        first = self._queue.get()
        if first is None:
            return []
        batch, deadline = [first], first.arrived + self._max_wait
        while len(batch) < self._max_batch:
            left = deadline - time.monotonic()
            try:
                one = self._queue.get(timeout=left) if left > 0 else self._queue.get_nowait()
            except Empty:
                break
            if one is None:
                self._queue.put(None)  # ends the next batch
                break
            batch.append(one)
        return batch

    def _predict(self, classifier: Classifier, batch: Sequence[_Waiting]) -> None:
        started = self._batch_started = time.monotonic()
        rows: LogProbabilities | Exception
        try:
            rows = classifier.log_probabilities(np.stack([one.pixels for one in batch]))
            self._failed_batches = 0
        except Exception as error:  # such as a GPU without memory: the images of this batch fail
            rows = error
            self._failed_batches += 1
            self._metrics.count_batch_failure()
        self._batch_started = None
        self._metrics.count_batch(len(batch), time.monotonic() - started)
        self._loop.call_soon_threadsafe(_deliver, [one.result for one in batch], rows)


def _deliver(results: Sequence["asyncio.Future[LogProbabilities]"], rows: LogProbabilities | Exception) -> None:
    for number, result in enumerate(results):
        if result.done():  # cancelled
            continue
        if isinstance(rows, Exception):
            result.set_exception(rows)
        else:
            result.set_result(rows[number])
