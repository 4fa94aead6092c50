"""Exported file as a model: its metadata, and the log-probabilities of its outputs.

ONNX files run in onnxruntime, which is imported on first use; the others in PyTorch (podscale.pytorch).
"""

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.config import InputSection
from podscale.config.export import EXPORT_METADATA_FILE, FILE_NAMES
from podscale.errors import InputError
from podscale.runs.model_files import DESCRIPTION_PREFIX
from podscale.util.formatting import one_line

EXPORT_FORMAT = "podscale-export-1"
SUFFIXES = {Path(FILE_NAMES[name]).suffix: name for name in ("onnx", "torch-export", "torchscript")}
"""Formats that predictions read, by the suffix of the file."""
SMALLEST_PROBABILITY = 1e-38
"""Least probability whose logarithm is taken; smaller ones count as it."""
PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")
"""Backends of onnxruntime, in order of preference."""
InferenceFunction = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]
"""Function from the input of an exported file to its output."""


@dataclass(frozen=True)
class ExportMetadata:
    """Metadata of an exported file.

    Args:
        description: content of model.json.
        weights_sha256: hash of the weights in hexadecimal digits.
        preprocessing: uint8 NHWC in and probabilities out; else normalised float32 NCHW in and logits out.
        temperature: divisor of the logits; None if the run fitted none.
        quantization: "int8", or "none".
    """

    description: Mapping[str, Any]
    weights_sha256: str
    preprocessing: bool
    temperature: float | None
    quantization: str = "none"

    def to_strings(self) -> dict[str, str]:
        """Return the metadata as strings by key. The values from model.json are JSON."""
        described = {f"{DESCRIPTION_PREFIX}{key}": json.dumps(value) for key, value in self.description.items()}
        return {
            "podscale:format": EXPORT_FORMAT,
            "podscale:run": str(self.description["run"]),
            "podscale:model": str(self.description["architecture"]["name"]),
            "podscale:weights_sha256": self.weights_sha256,
            "podscale:input": "uint8 NHWC, RGB" if self.preprocessing else "float32 NCHW, RGB, normalised",
            "podscale:output": "probabilities" if self.preprocessing else "logits",
            "podscale:temperature": "" if self.temperature is None else repr(self.temperature),
            "podscale:quantization": self.quantization,
            **described,
        }

    @classmethod
    def from_strings(cls, strings: Mapping[str, str], path: Path) -> "ExportMetadata":
        """Read the strings of `to_strings`. Raises InputError if they are not those of an exported file."""
        hint = "Name a file of `podscale export`, or the directory of a run or of a model."
        if (written := strings.get("podscale:format")) != EXPORT_FORMAT:
            problem = "not exported by Podscale" if written is None else f"exported by another version ({written})"
            raise InputError(problem, field=str(path), hint=hint)
        try:
            described = {
                key.removeprefix(DESCRIPTION_PREFIX): json.loads(value)
                for key, value in strings.items()
                if key.startswith(DESCRIPTION_PREFIX)
            }
            temperature = strings["podscale:temperature"]
            metadata = cls(
                described,
                strings["podscale:weights_sha256"],
                {"probabilities": True, "logits": False}[strings["podscale:output"]],
                float(temperature) if temperature else None,
                strings["podscale:quantization"],
            )
            _ = described["run"], described["classes"], described["architecture"], described["preprocessing"]
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(f"damaged metadata ({error})", field=str(path), hint=hint) from error
        return metadata


@dataclass(frozen=True)
class ExportedFile:
    """Path, format and metadata of an exported file."""

    path: Path
    format: str
    metadata: ExportMetadata

    @classmethod
    def open(cls, path: Path) -> "ExportedFile":
        """Read the metadata of a file. Raises InputError if it is not an exported file, or damaged."""
        format_name = SUFFIXES[path.suffix]
        strings = _onnx_metadata(path) if format_name == "onnx" else _torch_metadata(path)
        return cls(path, format_name, ExportMetadata.from_strings(strings, path))


def is_exported_file(path: Path) -> bool:
    """Return True for a path with the suffix of an exported file that is no directory."""
    return path.suffix in SUFFIXES and not path.is_dir()


class ExportedClassifier:
    """Classifier of an exported file."""

    def __init__(self, run: InferenceFunction, metadata: ExportMetadata, section: InputSection) -> None:
        self._run, self._metadata, self._section = run, metadata, section

    def log_probabilities(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return the log-softmax of the logits, float32 [n, classes]. Those of probabilities are T log(p).

        Args:
            images: uint8 [n, size, size, 3].
        """
        if not self._metadata.preprocessing:
            return log_softmax(self._run(normalise(images, self._section)))
        logarithms = np.log(np.maximum(self._run(images), np.float32(SMALLEST_PROBABILITY)))
        return log_softmax((self._metadata.temperature or 1.0) * logarithms)


def open_onnx(path: Path, index: int = 0, threads: int | None = None) -> InferenceFunction:
    """Load an ONNX file; return the function from its one input to its first output.

    Args:
        index: number of the GPU, if onnxruntime has GPUs.
        threads: threads of one operation on the CPU; None: onnxruntime's choice.
    """
    runtime = _import_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    available = set(runtime.get_available_providers())
    devices: dict[str, dict[str, Any]] = {"CUDAExecutionProvider": {"device_id": index}}
    providers = [(name, devices.get(name, {})) for name in PROVIDERS if name in available]
    session = _load_session(path, options, providers)
    name = session.get_inputs()[0].name

    def run(inputs: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        outputs: npt.NDArray[np.float32] = session.run(None, {name: inputs})[0]
        return outputs

    return run


def normalise(images: npt.NDArray[np.uint8], section: InputSection) -> npt.NDArray[np.float32]:
    """Return normalised images, float32 [n, 3, height, width], as podscale.pytorch.device_prefetcher.Normalise.

    Args:
        images: uint8 [n, height, width, 3].
    """
    pixels: npt.NDArray[np.float32] = np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32)
    if section.per_image_standardization:
        means = pixels.mean(axis=(1, 2, 3), keepdims=True, dtype=np.float64)
        deviations = pixels.std(axis=(1, 2, 3), keepdims=True, dtype=np.float64)
        pixels -= means.astype(np.float32)
        pixels /= np.maximum(deviations, pixels[0].size ** -0.5).astype(np.float32)
        return pixels
    mean, scale = (np.float32(255) * np.array(values, np.float32) for values in (section.mean, section.std))
    pixels *= (1 / scale).reshape(1, 3, 1, 1)
    pixels -= (mean / scale).reshape(1, 3, 1, 1)
    return pixels


def log_softmax(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
    """Return the logarithm of the softmax of `logits`, any float dtype [n, classes]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    values: npt.NDArray[np.float32] = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32)
    return values


def _onnx_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of an ONNX file as strings. Raises InputError if it cannot be read."""
    runtime = _import_runtime()
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return dict(_load_session(path, options, ["CPUExecutionProvider"]).get_modelmeta().custom_metadata_map)


def _torch_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in a torch archive, which is a zip file, without torch."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/extra/{EXPORT_METADATA_FILE}")]
            return dict(json.loads(archive.read(names[0]))) if names else {}
    except FileNotFoundError as error:
        raise InputError("there is no such file", field=str(path)) from error
    except (OSError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile) as error:  # of zip files of any origin
        raise InputError(f"cannot be read: {one_line(str(error))}", field=str(path)) from error


def _load_session(path: Path, options: Any, providers: list[Any]) -> Any:
    if not path.is_file():
        raise InputError("there is no such file", field=str(path))
    try:
        return _import_runtime().InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # onnxruntime has a class for each kind, in no common base
        raise InputError(f"onnxruntime cannot load it: {one_line(str(error))}", field=str(path)) from error


def _import_runtime() -> Any:
    """Import onnxruntime. Raises InputError with the extra that installs it."""
    try:
        return import_module("onnxruntime")
    except ImportError as error:
        hint = "Run `pip install 'podscale[export]'`"
        raise InputError("ONNX needs onnxruntime, which is not installed", field="onnxruntime", hint=hint) from error
