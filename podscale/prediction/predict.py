"""Predictions for images in order, one for each image, by this process or by several of this machine.

for prediction in predict("runs/digits", ["photos"]):
    print(prediction.image, prediction.classes[0], prediction.probabilities[0])
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from podscale.prediction.image_inputs import ImageItem, iter_items
from podscale.prediction.model import build_classifier
from podscale.prediction.predictor import PredictedItem, Prediction, PredictOptions, Predictor
from podscale.prediction.processes import predict_on_processes
from podscale.util.progress_reports import ProgressCallback, ProgressReporter, ignore_progress


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
    items = itertools.islice(iter_items(predictor.inputs), predictor.options.limit)
    for item, prediction in predict_items(predictor, items):
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
