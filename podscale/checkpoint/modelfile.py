"""The weights of a finished model: one safetensors file with the catalogue's names, the same for every engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors.numpy import load_file

from podscale.errors import InputError

WEIGHTS_FILE = "model.safetensors"
OTHER_WEIGHTS_FILES = {"trained": "ema.safetensors", "ema": "trained.safetensors"}
"""The other weights that a run kept, by which of them are the model (evaluate.weights)."""


def read_weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, npt.NDArray[Any]]:
    """Parameters and running statistics by name; `shapes`: of all that the network owns.

    Raises InputError where the file is missing or holds another architecture.
    """
    try:
        arrays: dict[str, npt.NDArray[Any]] = load_file(path)
    except FileNotFoundError as error:
        raise InputError("there is no trained model", field=str(path), hint="Run `podscale train` first.") from error
    except Exception as error:
        raise InputError(f"cannot read the trained model: {error}", field=str(path)) from error
    if dict(shapes) != {name: array.shape for name, array in arrays.items()}:
        raise InputError("these weights belong to another architecture than the model section's", field=str(path))
    return arrays
