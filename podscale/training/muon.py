"""Muon in both engines, without a framework: the matrices, and constants of the Newton-Schulz iteration (Jordan 2024).

A filter is the matrix (outputs, inputs x height x width).
"""

from collections.abc import Sequence
from math import prod, sqrt
from typing import Literal

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of X = a X + b (X X^T) X + c (X X^T)^2 X. They bring a singular value between 0.01 and 1 to
between 0.68 and 1.14 in five iterations, faster than coefficients with which it would converge to 1."""
EPS = 1e-7
"""Added to the norm of a matrix, which may be 0."""

MuonScale = Literal["aspect", "rms"]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a parameter of two or more dimensions."""
    return shape[0], prod(shape[1:])


def update_scale(rows: int, columns: int, scale: MuonScale) -> float:
    """Return the factor of an orthogonalised matrix (Jordan 2024; Liu 2025, equation 4)."""
    return sqrt(max(1.0, rows / columns)) if scale == "aspect" else 0.2 * sqrt(max(rows, columns))


def orthogonalised_parameters(shapes: Sequence[Sequence[int]], scaled: Sequence[bool], *, ends: bool) -> list[int]:
    """Return the indices of the parameters whose updates are orthogonalised.

    Args:
        shapes: shape of each parameter, in model order.
        scaled: False for each parameter that the document excludes from scaling.
        ends: include the first and the last matrix, those of the input and the output layer.
    """
    matrices = [index for index, shape in enumerate(shapes) if len(shape) > 1]
    chosen = matrices if ends else matrices[1:-1]
    return [index for index in chosen if scaled[index]]
