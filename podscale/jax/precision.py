"""Precision of forward and backward: fp32, or the network in bf16 (Ying 2018).

The optimizer always works in fp32: averaged gradients, norms, trust ratio, momentum and weights. So do batch norm's
parameters and statistics, and the loss.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from podscale.config import TrainSection
from podscale.errors import InputError

DTYPES: dict[str, DTypeLike] = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def compute_dtype(train: TrainSection) -> DTypeLike:
    """Return the dtype of a document's network. Raises InputError for a policy that this engine does not support."""
    if train.precision not in DTYPES:
        raise InputError(
            f"the JAX engine has {' and '.join(DTYPES)}",
            field="train.precision",
            got=train.precision,
            hint="Choose bf16, which TPUs multiply in.",
        )
    return DTYPES[train.precision]


def exact_products(train: TrainSection) -> Any:
    """Return the context to trace a step in: keeps fp32 factors, which a TPU would round to bf16."""
    return jax.default_matmul_precision("highest" if train.precision == "fp32" else "default")
