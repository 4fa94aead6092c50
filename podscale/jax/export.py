"""The final model: weights as safetensors, which both engines read and write."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors.numpy import save

from podscale import models
from podscale.checkpoint.modelfile import WEIGHTS, read_weights
from podscale.files import write_atomically
from podscale.jax.models import Arrays


def export(parameters: Arrays, statistics: Arrays, directory: Path) -> None:
    """Writes a model's fp32 weights and running statistics under the catalogue's names."""
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(array, np.float32) for name, array in {**parameters, **statistics}.items()}
    write_atomically(directory / WEIGHTS, save(arrays, metadata={"format": "pt"}))


def load_weights(spec: models.ModelSpec, path: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    """Parameters and running statistics of an exported model, fp32.

    Raises InputError where the file is missing or holds another architecture.
    """
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    shapes |= {buffer.name: buffer.shape for buffer in spec.buffers}
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in read_weights(path, shapes).items()}
    return (
        {parameter.name: arrays[parameter.name] for parameter in spec.parameters},
        {buffer.name: arrays[buffer.name] for buffer in spec.buffers},
    )
