"""Predictor: one model, its inputs and options, and the predictions of a chunk of images."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.errors import InputError
from podscale.prediction.image_inputs import (
    Failure,
    ImageInput,
    ImageItem,
    iter_items,
    open_inputs,
    standard_input_lines,
)
from podscale.prediction.model import Classifier, PredictionModel, open_model
from podscale.prediction.preparation import ChunkDecoder, DecodedChunk, ImagePreparer
from podscale.util.host_info import cpu_count, visible_gpus
from podscale.util.locations import Location

NOT_FINITE = "not_finite"
"""Reason of an image for which the model's output is not a number."""
CPU_BATCH = 32
"""Images of a batch on the CPU; larger ones take more memory and no less time."""
READING_THREADS = 16
"""Least threads that read if images come from a URL, because they mostly wait."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Most probable classes of one image, best first, with their probabilities.

    `label` is the true class, if the image is from a shard set. `temperature` divided the logits; 1 is plain softmax.
    With a `failure`, there are no classes.
    """

    image: str
    label: str | None = None
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    temperature: float = 1.0
    failure: Failure | None = None


PredictedItem = tuple[ImageItem, Prediction]


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of a prediction.

    Args:
        top: classes of each prediction, at most those of the model.
        batch: images of a batch; None: 32 on the CPU, `evaluate.batch` on a GPU.
        limit: predict the first images only; None: all.
        processes: processes that share the images and the GPUs; None: one for each GPU, or one.
        convert: convert images that the run's shard sets refuse, such as GIF or 16 bits, as `data.policy=convert`.
        calibrate: divide the logits by the temperature that the run's evaluation fitted.
    """

    top: int = 5
    batch: int | None = None
    limit: int | None = None
    processes: int | None = None
    convert: bool = False
    calibrate: bool = True


@dataclass(frozen=True)
class Predictor:
    """One prediction: the model, the opened inputs and the options."""

    model: PredictionModel
    inputs: Sequence[ImageInput]
    options: PredictOptions = field(default_factory=PredictOptions)

    @classmethod
    def open(
        cls, model: str | Path, images: Sequence[str], options: PredictOptions, lines: Iterable[str] | None = None
    ) -> "Predictor":
        """Open model and inputs; raises InputError if one of them is missing or an option is out of range."""
        for name in ("top", "batch", "limit", "processes"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise InputError("must be at least 1", field=f"--{name}", got=value)
        opened = open_model(model, calibrate=options.calibrate)
        lines = standard_input_lines() if lines is None else lines
        return cls(opened, open_inputs(images, opened.config, lines), options)

    @property
    def count(self) -> int:
        """Number of images, 0 if it is not known before the end."""
        counts = [one.count for one in self.inputs]
        total = 0 if None in counts else sum(count or 0 for count in counts)
        return total if self.options.limit is None else min(total, self.options.limit)

    @property
    def top(self) -> int:
        """Classes of each prediction."""
        return min(self.options.top, len(self.model.classes))

    @property
    def processes(self) -> int:
        return self.options.processes or visible_gpus() or 1

    @property
    def batch(self) -> int:
        return self.options.batch or (self.model.config.evaluate.batch if visible_gpus() else CPU_BATCH)

    @property
    def cores(self) -> int:
        """CPU cores of one process."""
        return max(1, cpu_count() // self.processes)

    @property
    def threads(self) -> int:
        """Threads of one process that read and decode."""
        remote = any(Location.parse(one.location).is_remote for one in self.inputs)
        return max(self.cores, READING_THREADS) if remote else self.cores

    def items(self) -> Iterator[ImageItem]:
        """Return the images to predict, in order."""
        return itertools.islice(iter_items(self.inputs), self.options.limit)

    def predict_chunks(
        self, classifier: Classifier, chunks: Iterator[Sequence[ImageItem]]
    ) -> Iterator[list[PredictedItem]]:
        """Yield the predictions of each chunk of items, in order, computed in this process."""
        with closing(self.open_decoder()) as decoder:
            for chunk in decoder.decode(chunks):
                yield self._predict_chunk(classifier, chunk)

    def open_decoder(self) -> ChunkDecoder:
        return ChunkDecoder(self.inputs, ImagePreparer(self.model.config, convert=self.options.convert), self.threads)

    def _predict_chunk(self, classifier: Classifier, chunk: DecodedChunk) -> list[PredictedItem]:
        usable = chunk.usable
        rows: dict[int, Prediction] = {}
        if usable:
            images = chunk.images if len(usable) == len(chunk.items) else chunk.images[usable]
            named = [(chunk.items[slot].name, chunk.items[slot].label) for slot in usable]
            found = predictions_of(self.model, named, classifier.log_probabilities(images), self.top)
            rows |= zip(usable, found, strict=True)
        for slot, failure in chunk.failures.items():
            rows[slot] = Prediction(chunk.items[slot].name, chunk.items[slot].label, failure=failure)
        return [(item, rows[slot]) for slot, item in enumerate(chunk.items)]


def predictions_of(
    model: PredictionModel,
    images: Iterable[tuple[str, str | None]],
    log_probabilities: npt.NDArray[np.float32],
    top: int,
) -> Iterator[Prediction]:
    """Yield the prediction of each image, or its failure if the model's output is not a number.

    Args:
        images: name and true class of each.
        log_probabilities: float32 [n, classes], log-softmax of the logits.
        top: classes of each prediction, at most those of the model.
    """
    temperature = model.temperature or 1.0
    topk, probabilities = top_classes(log_probabilities, top, temperature)
    for (name, label), indices, values in zip(images, topk.tolist(), probabilities.tolist(), strict=True):
        if np.isfinite(values[0]):
            names = tuple(model.classes[index] for index in indices)
            yield Prediction(name, label, names, tuple(values), temperature)
        else:
            yield Prediction(name, label, failure=Failure(NOT_FINITE, "the model's output is not a number"))


def top_classes(
    log_probabilities: npt.NDArray[np.float32], top: int, temperature: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the most probable classes [n, top], of equal ones the lower index first, and their probabilities.

    Probabilities are softmax(logits / temperature); the order is that of evaluation, which a temperature keeps.

    Args:
        log_probabilities: float32 [n, classes], log-softmax of the logits.
        temperature: positive; 1 is plain softmax.
    """
    topk = np.argsort(-log_probabilities, axis=1, kind="stable")[:, :top]
    return topk, np.take_along_axis(softmax(log_probabilities, temperature), topk, axis=1)


def softmax(log_values: npt.NDArray[np.floating[Any]], temperature: float) -> npt.NDArray[np.float64]:
    """Return softmax(log_values / temperature) over the classes, computed in float64 [n, classes].

    Args:
        log_values: logits or log-probabilities, any float dtype [n, classes].
        temperature: positive; 1 is plain softmax.
    """
    scaled = log_values.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probabilities: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return probabilities
