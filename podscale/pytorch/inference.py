"""Inference with a trained network: from its model directory, as one module to export, and from exported files."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from podscale.config import RunConfig
from podscale.config.export import EXPORT_METADATA_FILE
from podscale.errors import InputError
from podscale.pytorch.device_prefetcher import Normalise
from podscale.pytorch.evaluator import mean_logits
from podscale.pytorch.models import build_model
from podscale.pytorch.precision import build_precision, set_numerics
from podscale.pytorch.train_state import load_weights_file
from podscale.pytorch.trainer import build_model_on_device
from podscale.pytorch.world import world_of_one
from podscale.runs.model_files import EvaluatedModel
from podscale.util.formatting import first_line

EXAMPLE_IMAGES = 2
"""Batch of the example inputs; a batch of 1 would become a constant."""
OPSET = 20
"""Version of ONNX's operators."""
LARGEST_ONNX_BYTES = 2**31 - 2**20
"""Largest weights of a single ONNX file, bytes, because protobuf ends at 2 GiB."""
InferenceFunction = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]
"""Function from the input of an exported file to its output."""


class TorchClassifier:
    """Model of a model directory on one device: GPU `index`, or the CPU if there is none."""

    def __init__(self, model: EvaluatedModel, config: RunConfig, index: int = 0) -> None:
        """Load the weights. Raises InputError if they are missing or of another architecture."""
        set_numerics(config.train)
        device = _inference_device(index)
        world = world_of_one(device)
        self._precision = build_precision(config.train, world)
        self._model = build_model_on_device(config, world, len(model.description["classes"])).eval()
        self._precision.cast_parameters(self._model)
        load_weights_file(self._model, model.weights)
        self._normalise = Normalise(config.input, world, channels_last=config.train.channels_last)
        self._flip, self._device = config.evaluate.flip, device

    def log_probabilities(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return the log-softmax of the logits, float32 [n, classes].

        Args:
            images: uint8 [n, size, size, 3].
        """
        with torch.inference_mode(), self._precision.autocast():
            pixels = torch.from_numpy(images).to(self._device)
            logits = mean_logits(self._model, self._normalise(pixels), flip=self._flip)
        values: npt.NDArray[np.float32] = F.log_softmax(logits.float(), dim=1).cpu().numpy()
        return values


def use_threads(threads: int) -> None:
    """Limit the threads of one operation on the CPU."""
    torch.set_num_threads(threads)


def _inference_device(index: int) -> torch.device:
    return torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")


class InferenceModule(nn.Module):
    """Trained network with the flip of its evaluation, in fp32.

    With preprocessing: uint8 [n, size, size, 3] to probabilities [n, classes], softmax(logits / temperature). Without:
    normalised float32 [n, 3, size, size] to logits [n, classes].
    """

    def __init__(self, network: nn.Module, config: RunConfig, *, preprocessing: bool, temperature: float) -> None:
        super().__init__()
        world = world_of_one(torch.device("cpu"))
        self.network = network
        self._normalise = Normalise(config.input, world, channels_last=False) if preprocessing else None
        self._flip, self._temperature = config.evaluate.flip, temperature

    def forward(self, images: Tensor) -> Tensor:
        if self._normalise is None:
            return mean_logits(self.network, images, flip=self._flip)
        logits = mean_logits(self.network, self._normalise(images), flip=self._flip)
        return torch.softmax(logits / self._temperature, dim=1)


def build_inference_module(
    model: EvaluatedModel, config: RunConfig, *, preprocessing: bool, temperature: float
) -> InferenceModule:
    """Load the model of a directory on the CPU. Raises InputError if the weights are missing or of another network.

    Args:
        temperature: positive divisor of the logits; 1 is plain softmax.
    """
    network = build_model(config.model, len(model.description["classes"])).eval()
    load_weights_file(network, model.weights)
    network.requires_grad_(False)
    return InferenceModule(network, config, preprocessing=preprocessing, temperature=temperature).eval()


def export_onnx(module: nn.Module, example: Tensor, path: Path, metadata: Mapping[str, str], output: str) -> None:
    """Write an ONNX file with a dynamic batch.

    Args:
        example: input of EXAMPLE_IMAGES images.
        output: name of the output.
    """
    size = sum(array.nbytes for array in (*module.parameters(), *module.buffers()))
    if size > LARGEST_ONNX_BYTES:
        raise InputError("an ONNX file holds at most 2 GiB", field="--format", got=f"onnx, {size} bytes of weights")
    with _export_errors("onnx"):
        program: Any = torch.onnx.export(
            _exported_program(module, example),
            (example,),
            dynamo=True,
            input_names=["images"],
            output_names=[output],
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
        program.model.producer_name = "podscale"
        program.model.metadata_props.update(metadata)
        program.save(str(path), external_data=False)


def export_program(module: nn.Module, example: Tensor, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a file of torch.export with a dynamic batch.

    Args:
        example: as in `export_onnx`.
    """
    with _export_errors("torch-export"), path.open("wb") as file:
        torch.export.save(_exported_program(module, example), file, extra_files=_extra_files(metadata))


def export_torchscript(module: nn.Module, example: Tensor, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a traced TorchScript file.

    Args:
        example: as in `export_onnx`.
    """
    with _export_errors("torchscript"), torch.inference_mode():
        traced: Any = torch.jit.trace(module, example, check_trace=False)
        torch.jit.save(traced, str(path), _extra_files=_extra_files(metadata))


def write_weights(source: Path, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the weights of a safetensors file with metadata in its header. Raises InputError if it is damaged."""
    try:
        weights = load_file(source)
    except Exception as error:  # safetensors has an error of its own, in no common base
        raise InputError(f"cannot read the trained model: {first_line(error)}", field=str(source)) from error
    save_file(weights, path, metadata={"format": "pt", **metadata})


def load_program(path: Path, format_name: str, index: int = 0) -> InferenceFunction:
    """Load a file of torch.export or TorchScript on GPU `index`, or on the CPU if there is none.

    Raises InputError if it cannot be loaded. Returns the function from its input to its output.
    """
    device = _inference_device(index)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if format_name == "torchscript":
                module: Any = torch.jit.load(str(path), map_location=device)
            else:
                from torch.export.passes import move_to_device_pass

                module = move_to_device_pass(torch.export.load(str(path)), device).module()
    except Exception as error:  # any error of the reader on a damaged file
        raise InputError(f"PyTorch cannot load it: {first_line(error)}", field=str(path)) from error

    def run(inputs: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            outputs: npt.NDArray[np.float32] = module(torch.from_numpy(inputs).to(device)).cpu().numpy()
        return outputs

    return run


def example_input(config: RunConfig, *, preprocessing: bool) -> Tensor:
    """Return example images of the evaluation size."""
    size = config.eval_image_size
    if preprocessing:
        return torch.zeros((EXAMPLE_IMAGES, size, size, 3), dtype=torch.uint8)
    return torch.zeros((EXAMPLE_IMAGES, 3, size, size))


def _exported_program(module: nn.Module, example: Tensor) -> Any:
    return torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def _extra_files(metadata: Mapping[str, str]) -> dict[str, str]:
    return {EXPORT_METADATA_FILE: json.dumps(dict(metadata))}


@contextmanager
def _export_errors(format_name: str) -> Iterator[None]:
    """Raise InputError if torch cannot convert a network, such as one with control flow by values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecations, and of checks on shapes that are constants here
            yield
    except ImportError as error:
        hint = "Run `pip install 'podscale[export]'`"
        raise InputError(f"{error.name} is not installed", field=f"--format {format_name}", hint=hint) from error
    except Exception as error:
        problem = f"PyTorch cannot export this model: {first_line(error)}"
        raise InputError(problem, field=f"--format {format_name}") from error
