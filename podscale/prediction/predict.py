"""Predictions for images in order, one for each image, by this process or by several of this machine.

for prediction in predict("runs/digits", ["photos"]):
    print(prediction.image, prediction.classes[0], prediction.probabilities[0])

Of several processes, process k mod n takes chunk k, so reading the results in turn restores the order. A process has at
most CHUNKS_AHEAD + 1 chunks, so memory stays bounded however long the list is.
"""

import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from podscale.errors import PodscaleError
from podscale.prediction.image_inputs import ImageItem
from podscale.prediction.model import build_classifier
from podscale.prediction.predictor import PredictedItem, Prediction, PredictOptions, Predictor
from podscale.prediction.preparation import CHUNKS_AHEAD
from podscale.util.host_info import visible_gpus
from podscale.util.processes import exit_with_parent
from podscale.util.progress_reports import ProgressCallback, ProgressReporter, ignore_progress
from podscale.util.spawned_processes import MainlessContext

_EXIT_SECONDS = 10.0
"""Time for a process to exit at the end, seconds."""


def predict(
    model: str | Path,
    images: Sequence[str],
    options: PredictOptions | None = None,
    lines: Iterable[str] | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Iterator[Prediction]:
    """Yield the prediction of every image, in order. Raises InputError before the first if a model or image is missing.

    Args:
        model: directory of a run or of a model, or an exported file.
        images: files, folders, tars, shard sets and fsspec URLs; `-` for the list in `lines`.
        lines: one path or URL of an image each; None: standard input.
        progress: gets the progress, at most ten times a second.
    """
    predictor = Predictor.open(model, images, options or PredictOptions(), lines)
    return (prediction for _, prediction in predicted_items(predictor, progress))


def predicted_items(predictor: Predictor, progress: ProgressCallback = ignore_progress) -> Iterator[PredictedItem]:
    """Yield every image with its prediction, in order, and report the progress."""
    reporter = ProgressReporter("predict", progress, predictor.count)
    for item, prediction in predict_items(predictor, predictor.items()):
        yield item, prediction
        reporter.add(1, rejects=int(prediction.failure is not None))
    reporter.close()


def predict_items(predictor: Predictor, items: Iterator[ImageItem]) -> Iterator[PredictedItem]:
    """Yield each of these images of the predictor with its prediction, in order."""
    chunks = iter(lambda: list(itertools.islice(items, predictor.batch)), [])
    if predictor.processes == 1:
        results = predictor.predict_chunks(build_classifier(predictor.model), chunks)
    else:
        results = predict_on_processes(predictor, chunks)
    return itertools.chain.from_iterable(results)


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
