"""Result of an export: the file, its agreement with the model in PyTorch, and what users and registries get of both."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.config import RunConfig, data_fingerprint
from podscale.data.decode import Pixels
from podscale.errors import PodscaleError
from podscale.export.export_options import FORMATS
from podscale.export.image_sample import ImageSample
from podscale.prediction.exported_file import ExportMetadata
from podscale.prediction.model import Classifier
from podscale.prediction.predictor import softmax
from podscale.util.files import file_sha256
from podscale.util.formatting import format_bytes, format_count
from podscale.version import VERSION

TOLERANCE = 1e-4
"""Largest difference of an fp32 file: of a probability, and of a log-probability as a fraction of the largest."""
BATCH = 32
"""Images of a batch; the first batch has one image, so that the batch is seen to be dynamic."""

LogProbabilities = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Agreement:
    """Comparison of a file with a reference on some images.

    Args:
        images: number of images.
        source: their origin, for users.
        largest_difference: of a probability, over all images and classes.
        largest_log_difference: of a log-probability, as a fraction of the largest one in the reference; None if the
            file's outputs are probabilities.
        top1_equal: images with the same most probable class.
        near_ties: other images, whose two best classes differ by less than the tolerance in the reference.
        reference_top1: correct images of the reference as a fraction; None without labels.
        top1: correct images of the file as a fraction; None without labels.
    """

    images: int
    source: str
    largest_difference: float
    largest_log_difference: float | None
    top1_equal: int
    near_ties: int
    reference_top1: float | None
    top1: float | None

    @property
    def worst_difference(self) -> float:
        """Larger one of both differences."""
        return max(self.largest_difference, self.largest_log_difference or 0.0)

    def check(self, field: str) -> None:
        """Raise PodscaleError if the file differs by more than the tolerance."""
        worst, different = self.worst_difference, self.images - self.top1_equal - self.near_ties
        if not worst <= TOLERANCE or different:
            raise PodscaleError(
                f"the exported file differs from the model: by {worst:.1e} at most (tolerance {TOLERANCE:.0e}), with "
                f"another class for {different} of {self.images} images",
                field=field,
                hint="Nothing was written. Export in another format, and report this.",
            )


def log_probabilities(classifier: Classifier, images: Pixels) -> LogProbabilities:
    """Return the classifier's log-probabilities, float32 [n, classes], computed in batches of different sizes."""
    return np.concatenate([classifier.log_probabilities(images[part]) for part in _batches(len(images))])


def compare(
    reference: LogProbabilities,
    outputs: LogProbabilities,
    sample: ImageSample,
    temperature: float,
    *,
    with_logits: bool,
) -> Agreement:
    """Compare log-probabilities, float32 [n, classes], with those of the reference.

    Args:
        temperature: divisor of the logits in the probabilities.
        with_logits: the file's outputs are logits, so that the log-probabilities of all classes are exact.
    """
    expected, probabilities = softmax(reference, temperature), softmax(outputs, temperature)
    log_difference = float(np.abs(outputs - reference).max() / max(1.0, float(np.abs(reference).max())))
    best, other = reference.argmax(axis=1), outputs.argmax(axis=1)
    is_equal = best == other
    margins = np.abs(np.diff(np.partition(expected, -2, axis=1)[:, -2:], axis=1))[:, 0]
    labels = sample.labels
    return Agreement(
        images=len(sample),
        source=sample.source,
        largest_difference=float(np.abs(probabilities - expected).max()),
        largest_log_difference=log_difference if with_logits else None,
        top1_equal=int(is_equal.sum()),
        near_ties=int((~is_equal & (margins < TOLERANCE)).sum()),
        reference_top1=None if labels is None else float((best == labels).mean()),
        top1=None if labels is None else float((other == labels).mean()),
    )


@dataclass(frozen=True)
class Export:
    """Exported file with the result of its check.

    Args:
        path: final name.
        written: where the file is now.
        format: key of `FORMATS`.
        agreement: comparison of the file with PyTorch.
        fp32: for int8, that of its fp32 form.
        calibration: calibration images of int8, for users.
    """

    path: Path
    written: Path
    format: str
    metadata: ExportMetadata
    agreement: Agreement
    fp32: Agreement | None = None
    calibration: str | None = None

    @property
    def report(self) -> Path:
        """Report of the check, beside the file."""
        return self.path.with_name(f"{self.path.name}.json")

    @property
    def opset(self) -> int | None:
        """Version of ONNX's operators; None in other formats."""
        if self.format != "onnx":
            return None
        imports = import_module("onnx").load(str(self.written), load_external_data=False).opset_import
        return next(int(each.version) for each in imports if not each.domain)

    def to_json(self) -> dict[str, Any]:
        """Return the report of the check."""
        described, packages = self.metadata.to_strings(), ("torch", *FORMATS[self.format].packages)
        return {
            "file": self.path.name,
            "sha256": file_sha256(self.written),
            "bytes": self.written.stat().st_size,
            "format": self.format,
            **{
                name: described[f"podscale:{name}"]
                for name in ("run", "model", "weights_sha256", "input", "output", "quantization")
            },
            "temperature": self.metadata.temperature,
            "opset": self.opset,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "packages": {"podscale": VERSION, **{name: str(import_module(name).__version__) for name in packages}},
            "check": asdict(self.agreement),
            "check_fp32": asdict(self.fp32) if self.fp32 is not None else None,
            "calibration": self.calibration,
        }

    def to_text(self) -> str:
        """Return the report in a few lines for the terminal."""
        description, agreement = self.metadata.description, self.agreement
        size, pixels = description["preprocessing"]["image_size"], self.metadata.preprocessing
        shape = f"uint8 [n, {size}, {size}, 3]" if pixels else f"float32 [n, 3, {size}, {size}], normalised"
        opset = f", opset {self.opset}" if self.opset is not None else ""
        classes = len(description["classes"])
        lines = [
            f"{self.path}: {FORMATS[self.format].label}{opset}, {format_bytes(self.written.stat().st_size)}",
            f"  in: {shape}; out: {'probabilities' if pixels else 'logits'} of {classes} classes",
        ]
        if pixels and self.metadata.temperature is not None:
            lines[-1] += f", calibrated by temperature {self.metadata.temperature:.3f}"
        checked = self.fp32 or agreement
        same = f"the same class for {checked.top1_equal:,} of {format_count(checked.images, 'image')}"
        if checked.near_ties:
            same += f" ({format_count(checked.near_ties, 'near tie')})"
        difference = f"differs by {checked.worst_difference:.1e} at most (tolerance {TOLERANCE:.0e})"
        lines.append(f"  check against PyTorch: {difference}, {same}")
        lines.append(f"  images: {agreement.source}")
        if checked.top1 is not None:
            lines.append(f"  top-1 {checked.top1:.2%}")
        if self.fp32 is not None:
            lines += self._int8_lines()
        return "\n".join([*lines, f"  report: {self.report}"])

    def _int8_lines(self) -> list[str]:
        agreement = self.agreement
        equal = f"the same class as fp32 for {agreement.top1_equal:,} of {format_count(agreement.images, 'image')}"
        lines = [f"  int8: {equal}, calibrated on {self.calibration}"]
        if agreement.top1 is not None and agreement.reference_top1 is not None:
            loss = 100 * (agreement.reference_top1 - agreement.top1)
            lines.append(f"  int8: top-1 {agreement.top1:.2%}, a loss of {loss:.2f} points")
        return lines


def exports_identity(exports: Sequence[Export]) -> str:
    """Return the hash by which a registry knows the same exports again: of the files' names and metadata.

    Two exports of a model may differ in bytes.
    """
    names = [[export.path.name, export.metadata.to_strings()] for export in exports]
    return hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()


def version_properties(config: RunConfig, exports: Sequence[Export]) -> dict[str, str | float]:
    """Return the properties of a version: run, network, hashes of weights and data, formats, and its top-1.

    `top1` is that of the model in PyTorch on the images of the check; absent without labels.
    """
    metadata, agreement = exports[0].metadata, exports[0].agreement
    top1 = {} if agreement.reference_top1 is None else {"top1": agreement.reference_top1}
    return {
        "run": str(metadata.description["run"]),
        "model": str(metadata.description["architecture"]["name"]),
        "weights_sha256": metadata.weights_sha256,
        "data_fingerprint": data_fingerprint(config.data),
        "formats": ",".join(export.format for export in exports),
        **top1,
    }


def _batches(count: int) -> Iterator[slice]:
    yield slice(0, 1)
    for begin in range(1, count, BATCH):
        yield slice(begin, min(begin + BATCH, count))
