"""Predictions of a trained model for images: `predict`."""

from collections.abc import Callable, Iterable, Iterator
from os import PathLike, fspath
from typing import TYPE_CHECKING

from podscale.api.results import Run
from podscale.util.progress_reports import ProgressUpdate
from podscale.util.terminal import progress_callback

if TYPE_CHECKING:
    from podscale.prediction.predictor import Prediction


def predict(  # noqa: PLR0913 (options of the public function, each with a default)
    model: str | PathLike[str] | Run,
    images: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    top: int = 5,
    batch: int | None = None,
    limit: int | None = None,
    processes: int | None = None,
    convert: bool = False,
    calibrate: bool = True,
    progress: bool | Callable[[ProgressUpdate], None] = False,
) -> "Iterator[Prediction]":
    """Yield the prediction of every image, in the order of the images.

        for one in podscale.predict("runs/digits", "photos"):
            print(one.image, one.classes[0], one.probabilities[0])

    An image that has no prediction has a `failure` with its reason. Memory does not grow with the number of images.

    Args:
        model: directory of a run or of a model, an exported file, or the result of `train` or `run`.
        images: files, folders, tars, shard sets or fsspec URLs, one or several.
        top: classes of each prediction, best first.
        batch: images of a batch; None: 32 on a CPU, `evaluate.batch` on a GPU.
        limit: predict the first images only; None: all.
        processes: processes that share the images; None: one for each GPU, or one.
        convert: convert images of other formats and depths, as `data.policy=convert`.
        calibrate: divide the logits by the temperature that the run's evaluation fitted.
        progress: show the progress on standard error; or a function that gets each update.

    Raises:
        InputError: The model or an input does not exist; raised by the call, before the first prediction.
    """
    from podscale.prediction.predict import predict as predict_all
    from podscale.prediction.predictor import PredictOptions

    directory = model.directory if isinstance(model, Run) else fspath(model)
    names = [images] if isinstance(images, str | PathLike) else images
    options = PredictOptions(
        top=top, batch=batch, limit=limit, processes=processes, convert=convert, calibrate=calibrate
    )
    return predict_all(directory, [fspath(name) for name in names], options, progress=progress_callback(progress))
