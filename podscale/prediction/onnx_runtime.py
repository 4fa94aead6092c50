"""ONNX files in onnxruntime, which is imported on first use."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.errors import InputError
from podscale.util.formatting import one_line

PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")
"""Backends in order of preference."""
InferenceFunction = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]
"""Function from the input of an exported file to its output."""


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of an ONNX file as strings. Raises InputError if it cannot be read."""
    runtime = _import_runtime()
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return dict(_load(path, options, ["CPUExecutionProvider"]).get_modelmeta().custom_metadata_map)


def open_session(path: Path, index: int = 0, threads: int | None = None) -> InferenceFunction:
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
    session = _load(path, options, providers)
    name = session.get_inputs()[0].name

    def run(inputs: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        outputs: npt.NDArray[np.float32] = session.run(None, {name: inputs})[0]
        return outputs

    return run


def _load(path: Path, options: Any, providers: list[Any]) -> Any:
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
