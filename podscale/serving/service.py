"""Predictions of uploaded images: admission, decoding in threads, the model, and the rows of `podscale predict`."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus

import numpy as np

from podscale.data.decode import Pixels
from podscale.prediction.image_inputs import EncodedImage, Failure
from podscale.prediction.model import Classifier, PredictionModel
from podscale.prediction.predictor import NOT_FINITE, Prediction, predictions_of
from podscale.prediction.preparation import ImagePreparer, prepare_or_fail
from podscale.serving.batcher import Batcher, LogProbabilities
from podscale.serving.metrics import ServingMetrics
from podscale.serving.options import ServeOptions
from podscale.serving.uploads import RequestError, Upload, parse_uploads

MODEL_FAILED = "model_failed"
"""Reason of an image in a batch for which the model raised an error."""
LONGEST_RETRY_SECONDS = 30


class ClassificationService:
    """Predictions by one process. `start` loads the model in its own thread; images are accepted when `is_ready`.

    Args:
        load: loads the model.
    """

    def __init__(
        self, model: PredictionModel, load: Callable[[], Classifier], options: ServeOptions, metrics: ServingMetrics
    ) -> None:
        self.model, self._options, self._metrics = model, options, metrics
        self._preparer = ImagePreparer(model.config, convert=options.convert)
        self._decoders = ThreadPoolExecutor(options.cores, thread_name_prefix="podscale-decode")
        self._batcher = Batcher(load, self._preparer.size, options.batch, options.max_wait_ms / 1000, metrics)
        self._accepted = 0
        self._finished = 0
        self._finished_since = time.monotonic()
        metrics.watch("serve_queue_images", lambda: self._accepted)

    @property
    def is_ready(self) -> bool:
        """True once the model is loaded and its first batches ran."""
        return self._batcher.is_ready

    @property
    def is_healthy(self) -> bool:
        return self._batcher.is_healthy

    @property
    def error(self) -> BaseException | None:
        """Error of loading the model."""
        return self._batcher.error

    @property
    def image_size(self) -> int:
        """Side of the images that the model sees, pixels."""
        return self._preparer.size

    @property
    def max_image_bytes(self) -> int:
        return self._preparer.max_bytes

    def start(self) -> None:
        self._batcher.start(asyncio.get_running_loop())

    def close(self) -> None:
        self._batcher.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)

    async def classify_body(self, content_type: str, body: bytes, top: int) -> list[Prediction]:
        """Return a prediction for each image of a body. Raises RequestError for an invalid body or a full queue."""
        loop = asyncio.get_running_loop()
        uploads = await loop.run_in_executor(self._decoders, parse_uploads, content_type, body, self._options.queue)
        with self._admit(len(uploads)):
            return await asyncio.gather(*(self._classify(upload, top) for upload in uploads))

    async def _classify(self, upload: Upload, top: int) -> Prediction:
        pixels = await asyncio.get_running_loop().run_in_executor(self._decoders, self._prepare, upload)
        row = pixels if isinstance(pixels, Failure) else await self._log_probabilities(pixels)
        if isinstance(row, Failure):
            prediction = Prediction(upload.name, failure=row)
        else:
            (prediction,) = predictions_of(self.model, [(upload.name, None)], row[np.newaxis], top)
        if prediction.failure is None:
            self._metrics.count_image()
        else:
            self._metrics.count_image_failure(prediction.failure.reason)
        return prediction

    def _prepare(self, upload: Upload) -> Pixels | Failure:
        return prepare_or_fail(self._preparer, upload.name.encode(), lambda: EncodedImage(upload.data))

    async def _log_probabilities(self, pixels: Pixels) -> LogProbabilities | Failure:
        try:
            return await self._batcher.submit(pixels)
        except Exception as error:  # of the model, on this image's batch
            return Failure(MODEL_FAILED, f"{type(error).__name__}: {error}"[:200])

    @contextmanager
    def _admit(self, images: int) -> Iterator[None]:
        """Count the images as accepted. Raises RequestError if there are too many."""
        if self._accepted + images > self._options.queue:
            detail = f"{self._accepted} images are waiting, at most {self._options.queue}"
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "overloaded", detail, self._retry_seconds())
        if not self._accepted:
            self._finished, self._finished_since = 0, time.monotonic()
        self._accepted += images
        try:
            yield
        finally:
            self._accepted -= images
            self._finished += images

    def _retry_seconds(self) -> int:
        """Return the time that the accepted images take at the present speed, seconds."""
        speed = self._finished / max(0.001, time.monotonic() - self._finished_since)
        return max(1, min(LONGEST_RETRY_SECONDS, math.ceil(self._accepted / speed))) if speed else 1


def status_of(predictions: Sequence[Prediction]) -> HTTPStatus:
    """Return 200 if any image has a prediction, else the status for the first image's failure."""
    first = predictions[0].failure
    if first is None or any(one.failure is None for one in predictions):
        return HTTPStatus.OK
    if first.reason in (NOT_FINITE, MODEL_FAILED):
        return HTTPStatus.INTERNAL_SERVER_ERROR
    return HTTPStatus.REQUEST_ENTITY_TOO_LARGE if first.reason == "too_many_bytes" else HTTPStatus.BAD_REQUEST
