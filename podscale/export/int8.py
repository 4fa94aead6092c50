"""Static int8 quantisation of an ONNX file: weights per channel, activations by their range on calibration images.

The range of an activation leaves out the largest 0.01 per mille of its values, which would stretch it for all others.
"""

import io
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.errors import InputError
from podscale.util.formatting import one_line

QUANTISED_OPERATORS = ("Conv", "Gemm", "MatMul", "Add", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat")
"""Operators that compute in int8. The others stay in fp32, such as softmax, whose outputs have a wide range."""
MATRIX_OPERATORS = ("Conv", "Gemm", "MatMul")
"""Operators with trained weights. What comes before the first or after the last of them stays in fp32."""
PERCENTILE = 99.999
"""Percentage of an activation's values in its range."""
_BATCH = 16
"""Calibration images of a batch; the activations of one batch are in memory at a time."""


def quantise(source: Path, target: Path, images: npt.NDArray[Any]) -> None:
    """Write the int8 form of an ONNX file, with QuantizeLinear and DequantizeLinear nodes (QDQ).

    Args:
        images: calibration images as the file takes them.
    """
    onnx, quantization = import_package("onnx"), import_package("onnxruntime.quantization")
    preprocess = import_package("onnxruntime.quantization.shape_inference").quant_pre_process
    prepared = target.with_name(f"{target.name}.prepared")
    try:
        preprocess(str(source), str(prepared), skip_symbolic_shape=True)
        graph = onnx.load(str(prepared)).graph
        with redirect_stdout(io.StringIO()):  # it prints its progress
            quantization.quantize_static(
                str(prepared),
                str(target),
                _Reader(images, graph.input[0].name),
                quant_format=quantization.QuantFormat.QDQ,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                op_types_to_quantize=list(QUANTISED_OPERATORS),
                nodes_to_exclude=_outside_of_the_network(graph.node),
                calibrate_method=quantization.CalibrationMethod.Percentile,
                extra_options={
                    "CalibPercentile": PERCENTILE,
                    "CalibTensorRangeSymmetric": False,
                    "CalibStridedMinMax": 1,  # one batch at a time, in spite of its name for every method
                },
            )
        _copy_metadata(onnx, source, target)
    except InputError:
        raise
    except Exception as error:
        problem = f"onnxruntime cannot quantise this model: {one_line(str(error))}"
        raise InputError(problem, field="--int8") from error
    finally:
        prepared.unlink(missing_ok=True)


def import_package(name: str) -> Any:
    """Import a package of the extra `export`. Raises InputError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        hint = "Run `pip install 'podscale[export]'`"
        raise InputError(f"{error.name or name} is not installed", field="--int8", hint=hint) from error


class _Reader:
    """Calibration images in batches, as onnxruntime takes them."""

    def __init__(self, images: npt.NDArray[Any], name: str) -> None:
        self._images, self._name = images, name
        self._positions = iter(range(len(self)))

    def __len__(self) -> int:
        return -(-len(self._images) // _BATCH)

    def set_range(self, start_index: int, end_index: int) -> None:
        self._positions = iter(range(start_index, end_index))

    def get_next(self) -> dict[str, npt.NDArray[Any]] | None:
        position = next(self._positions, None)
        if position is None:
            return None
        return {self._name: np.ascontiguousarray(self._images[position * _BATCH : (position + 1) * _BATCH])}


def _outside_of_the_network(nodes: Any) -> list[str]:
    """Return the names of the nodes before the first and after the last operator with weights, in graph order."""
    positions = [number for number, node in enumerate(nodes) if node.op_type in MATRIX_OPERATORS]
    if not positions:
        return []
    return [node.name for number, node in enumerate(nodes) if not positions[0] <= number <= positions[-1]]


def _copy_metadata(onnx: Any, source: Path, target: Path) -> None:
    """Copy the metadata of `source`, and record the quantisation."""
    model = onnx.load(str(target))
    values = {entry.key: entry.value for entry in onnx.load(str(source), load_external_data=False).metadata_props}
    onnx.helper.set_model_props(model, {**values, "podscale:quantization": "int8"})
    model.producer_name = "podscale"
    onnx.save(model, str(target))
