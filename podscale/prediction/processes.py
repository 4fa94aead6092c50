"""Predictions by several processes of this machine: each takes chunks of the list in turn, rows come back in order.

Chunk k goes to process k mod n, so reading the results in turn restores the order. A process has at most
CHUNKS_AHEAD + 1 chunks, so memory stays bounded however long the list is.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

from podscale.errors import PodscaleError
from podscale.prediction.decoded_chunks import CHUNKS_AHEAD
from podscale.prediction.image_inputs import ImageItem
from podscale.prediction.model import build_classifier
from podscale.prediction.predictor import PredictedItem, Predictor
from podscale.util.host_info import visible_gpus
from podscale.util.processes import exit_with_parent
from podscale.util.spawned_processes import MainlessContext

_EXIT_SECONDS = 10.0
"""Time for a process to exit at the end, seconds."""


class _Worker:
    """Connection to one process."""

    def __init__(self, connection: Connection, process: multiprocessing.process.BaseProcess) -> None:
        self._connection, self._process = connection, process

    def send(self, chunk: Sequence[ImageItem] | None) -> None:
        """Send a chunk; None: there are no more. Raises as `receive` if the process has exited."""
        try:
            self._connection.send(chunk)
        except OSError:
            while True:  # behind the results that it sent before is its error
                self.receive()

    def receive(self) -> list[PredictedItem]:
        """Return the predictions of the oldest chunk. Raises the process's error, or PodscaleError if it has exited."""
        try:
            result = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(_EXIT_SECONDS)
            raise PodscaleError(
                "a process of the prediction exited",
                field="--processes",
                got=f"exit code {self._process.exitcode}",
                hint="If it had too little memory, use fewer processes or a smaller --batch.",
            ) from error
        if isinstance(result, PodscaleError):
            raise result
        rows: list[PredictedItem] = result
        return rows


def predict_on_processes(predictor: Predictor, chunks: Iterator[Sequence[ImageItem]]) -> Iterator[list[PredictedItem]]:
    """Yield the predictions of each chunk, in order, computed by `predictor.processes` processes."""
    with ExitStack() as stack:
        workers = [stack.enter_context(_start_worker(predictor, index)) for index in range(predictor.processes)]
        turns: deque[_Worker] = deque()
        limit = len(workers) * (CHUNKS_AHEAD + 1)
        for number, chunk in enumerate(chunks):
            if len(turns) == limit:
                yield turns.popleft().receive()
            worker = workers[number % len(workers)]
            worker.send(chunk)
            turns.append(worker)
        for worker in workers:
            worker.send(None)
        while turns:
            yield turns.popleft().receive()


@contextmanager
def _start_worker(predictor: Predictor, index: int) -> Iterator[_Worker]:
    """Start a process; it is killed at the end if it does not exit, as after an error."""
    context = MainlessContext()
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_worker, args=(predictor, theirs, index, os.getpid()), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Worker(ours, process)
        process.join(_EXIT_SECONDS)
    finally:
        ours.close()
        process.kill()
        process.join()


def _run_worker(predictor: Predictor, connection: Connection, index: int, parent: int) -> None:
    exit_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal signals the whole group; the parent kills this process
    try:
        gpu = index % max(1, visible_gpus())
        classifier = build_classifier(predictor.model, gpu, predictor.cores)
        for rows in predictor.predict_chunks(classifier, iter(connection.recv, None)):
            connection.send(rows)
    except PodscaleError as error:
        connection.send(error)
