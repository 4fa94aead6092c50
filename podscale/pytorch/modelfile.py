"""A trained model's weights, as every engine exports them, into a network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from podscale.runs.model_files import read_weights


def load_weights_file(model: nn.Module, path: Path) -> None:
    """Loads exported weights into `model`, in place.

    Raises InputError where the file is missing or holds another architecture.
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    load_arrays(model, read_weights(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}))


def load_arrays(model: nn.Module, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Loads parameters and buffers by their names into `model`, in place."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(arrays[name]))
