"""Static int8 quantisation of an ONNX file: weights per channel, activations by the range on calibration images."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.data.decode import Pixels
from podscale.errors import InputError
from podscale.util.formatting import one_line

QUANTISED_OPERATORS = ("Conv", "Gemm", "MatMul", "Add", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat")
"""Operators that compute in int8. The others stay in fp32, such as softmax, whose outputs have a wide range."""
MATRIX_OPERATORS = ("Conv", "Gemm", "MatMul")
"""Operators with trained weights. What comes before the first or after the last of them stays in fp32."""
_BATCH = 16
"""Calibration images of a batch."""


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

    def __init__(self, images: Pixels, name: str) -> None:
        self._batches = self._iterate(images, name)

    def get_next(self) -> dict[str, npt.NDArray[Any]] | None:
        return next(self._batches, None)

    @staticmethod
    def _iterate(images: npt.NDArray[Any], name: str) -> Iterator[dict[str, npt.NDArray[Any]]]:
        for begin in range(0, len(images), _BATCH):
            yield {name: np.ascontiguousarray(images[begin : begin + _BATCH])}


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
