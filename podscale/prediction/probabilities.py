"""Softmax and its logarithm, in float64."""

from typing import Any

import numpy as np
import numpy.typing as npt


def softmax(log_values: npt.NDArray[np.floating[Any]], temperature: float) -> npt.NDArray[np.float64]:
    """Return softmax(log_values / temperature) over the classes, float64 [n, classes].

    Args:
        log_values: logits or log-probabilities, any float dtype [n, classes].
        temperature: positive; 1 is plain softmax.
    """
    scaled = log_values.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probabilities: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return probabilities


def log_softmax(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
    """Return the logarithm of the softmax of `logits`, any float dtype [n, classes]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    values: npt.NDArray[np.float32] = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32)
    return values
