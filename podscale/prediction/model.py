"""Model of a prediction: its files, its run document, its classes, and the temperature of its probabilities.

It is a run or model directory, or an exported file; a server also copies one from a URL.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
import numpy.typing as npt

from podscale.config import RunConfig
from podscale.data.sources.base import decode_name
from podscale.data.sources.storage import open_storage
from podscale.errors import InputError
from podscale.evaluation.evaluation_json import read_evaluation
from podscale.prediction.exported_file import (
    SUFFIXES,
    ExportedClassifier,
    ExportedFile,
    is_exported_file,
    open_onnx,
)
from podscale.runs.model_files import EvaluatedModel, find_model_directory, read_model, run_document_of, run_of
from podscale.runs.user_code import MODEL_CODE, code_of_model, imported_from
from podscale.util.files import file_sha256
from podscale.util.formatting import one_line, printable
from podscale.util.locations import Location

TOP_FILES = ("config.yaml", "evaluation.json", MODEL_CODE)
"""Files that a prediction reads at the top of a run or model directory, besides model.*."""


class Classifier(Protocol):
    """Function from prepared images to log-probabilities; an exported file can be another implementation."""

    def log_probabilities(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return float32 [n, classes] for `images`, uint8 [n, size, size, 3]."""
        ...


@dataclass(frozen=True)
class PredictionModel:
    """Model of a run or model directory, or of an exported file.

    `config` is the document of its run, or what model.json has of it. `temperature` divides the logits before softmax;
    None if the run was not evaluated, or by a version that did not fit it: the probabilities are then plain softmax.
    `files.directory` of an exported file is the file.
    """

    files: EvaluatedModel
    config: RunConfig
    temperature: float | None
    exported: ExportedFile | None = None

    @cached_property
    def classes(self) -> Sequence[str]:
        """Class names in index order, fit for any output."""
        return [printable(name) for name in self.files.description["classes"]]

    @cached_property
    def weights_sha256(self) -> str:
        """Hash of the weights; of an exported file, of those that it was exported from.

        Raises InputError if they cannot be read.
        """
        return _weights_sha256(self.files) if self.exported is None else self.exported.metadata.weights_sha256

    @cached_property
    def exported_sha256(self) -> str | None:
        """Hash of an exported file, whose int8 form has other rows; None for a directory."""
        return None if self.exported is None else file_sha256(self.exported.path)


def open_model(path: str | Path, *, calibrate: bool = True) -> PredictionModel:
    """Open the model of a run or model directory, or an exported file. Raises InputError if there is none.

    Args:
        calibrate: use the temperature that the run's evaluation fitted, if there is one.
    """
    if is_exported_file(Path(path)):
        return _open_exported(ExportedFile.open(Path(path)), calibrate=calibrate)
    directory = find_model_directory(Path(path))
    files = read_model(directory)
    return PredictionModel(files, run_document_of(files), _fitted_temperature(files) if calibrate else None)


@contextmanager
def open_model_at(location: str, *, calibrate: bool = True) -> Iterator[PredictionModel]:
    """Open a model; one behind a URL is copied to the temporary directory until the end of the block.

    Args:
        location: path or fsspec URL of a run or model directory, or of an exported file.
        calibrate: use the temperature that the run's evaluation fitted, if there is one.

    Raises:
        InputError: There is no model, or it cannot be read.
    """
    parsed = Location.parse(location)
    if not parsed.is_remote:
        yield open_model(parsed.path, calibrate=calibrate)
        return
    name = PurePosixPath(parsed.path.partition("?")[0]).name
    with tempfile.TemporaryDirectory(prefix="podscale-model-") as directory:
        file = Path(directory, name) if Path(name).suffix in SUFFIXES else None
        _copy_model(location, Path(directory), file)
        yield open_model(directory if file is None else file, calibrate=calibrate)


def build_classifier(model: PredictionModel, index: int = 0, threads: int | None = None) -> Classifier:
    """Load the model on GPU `index`, or on the CPU with `threads` threads (default: the library's choice)."""
    exported = model.exported
    if exported is not None and exported.format == "onnx":
        run = open_onnx(exported.path, index, threads)
        return ExportedClassifier(run, exported.metadata, model.config.input)
    if find_spec("torch") is None:
        hint = "Run `pip install 'podscale[torch]'`"
        raise InputError("predictions need PyTorch, which is not installed", field="predict", hint=hint)
    from podscale.pytorch import inference

    if threads is not None:
        inference.use_threads(threads)
    if exported is not None:
        run = inference.load_program(exported.path, exported.format, index)
        return ExportedClassifier(run, exported.metadata, model.config.input)
    with imported_from(code_of_model(model.files.directory, model.config)):
        return inference.TorchClassifier(model.files, model.config, index)


def _open_exported(exported: ExportedFile, *, calibrate: bool) -> PredictionModel:
    """Return the model of an exported file, with the document that its metadata describe."""
    files = EvaluatedModel(exported.path, dict(exported.metadata.description))
    temperature = exported.metadata.temperature if calibrate else None
    try:
        model = PredictionModel(files, run_document_of(files), temperature, exported)
        _ = model.classes
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # the file may be from anywhere
        raise InputError(f"damaged metadata ({one_line(str(error))})", field=str(exported.path)) from error
    return model


def _weights_sha256(files: EvaluatedModel) -> str:
    try:
        return file_sha256(files.weights)
    except OSError as error:
        problem = f"the weights cannot be read: {error.strerror}"
        raise InputError(problem, field=str(files.weights), hint="Copy the model directory as a whole.") from error


def _fitted_temperature(files: EvaluatedModel) -> float | None:
    """Return the temperature in the run's evaluation.json, if it is the evaluation of these very weights."""
    run = run_of(files.directory)
    if run is None or not run.evaluation.exists():
        return None
    evaluation = read_evaluation(run.evaluation)
    if evaluation.identity.model_sha256 != _weights_sha256(files):
        return None
    return evaluation.calibration.temperature


def _copy_model(location: str, target: Path, exported: Path | None) -> None:
    """Copy the model's files, and those of its run that a prediction reads. Raises InputError.

    Args:
        exported: copy of an exported file; None for a directory.
    """
    try:
        storage = open_storage(location)
        if exported is not None:
            exported.write_bytes(storage.read(b""))
            return
        for file in storage.files():
            path = decode_name(file.path)
            folder, _, name = path.rpartition("/")
            if folder == "model" or (not folder and (name in TOP_FILES or name.startswith("model."))):
                copy = target / path
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(storage.read(file.path))
    except (OSError, InputError) as error:
        problem = error.problem if isinstance(error, InputError) else f"cannot be read: {error}"
        raise InputError(problem, field="MODEL", got=location) from error
