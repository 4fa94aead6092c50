"""A trained model's weights, as every engine exports them."""

from pathlib import Path
from typing import Any

import numpy.typing as npt

from podscale import models
from podscale.runs.model_files import read_weights

Values = npt.NDArray[Any]


def load_weights_file(spec: models.ModelSpec, path: Path) -> tuple[dict[str, Values], dict[str, Values]]:
    """Parameters and running statistics of an exported model, fp32.

    Raises InputError where the file is missing or holds another architecture.
    """
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    shapes |= {buffer.name: buffer.shape for buffer in spec.buffers}
    arrays = read_weights(path, shapes)
    return (
        {parameter.name: arrays[parameter.name] for parameter in spec.parameters},
        {buffer.name: arrays[buffer.name] for buffer in spec.buffers},
    )
