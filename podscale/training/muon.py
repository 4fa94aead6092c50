"""Muon in both engines, without a framework: the matrices, and constants of the Newton-Schulz iteration (Jordan 2024).

A filter is the matrix (outputs, inputs x height x width).
"""

from collections.abc import Sequence
from math import prod, sqrt

from podscale.config.optimizer import MuonSection
from podscale.models import ModelSpec

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of X = a X + b (X X^T) X + c (X X^T)^2 X. They bring a singular value between 0.01 and 1 to
between 0.68 and 1.14 in five iterations, faster than coefficients with which it would converge to 1."""
EPS = 1e-7
"""Added to the norm of a matrix, which may be 0."""


def orthogonalised_names(section: MuonSection, spec: ModelSpec) -> set[str]:
    """Return the names of the parameters whose updates are orthogonalised, unless `train.optimizer.skip` has them.

    They are the weight matrices, by default but for the first and the last one, those of the input and output layer.
    """
    matrices = [each.name for each in spec.parameters if each.role == "weight" and len(each.shape) > 1]
    return set(matrices if section.ends else matrices[1:-1])


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a parameter of two or more dimensions."""
    return shape[0], prod(shape[1:])


def update_scale(rows: int, columns: int, section: MuonSection) -> float:
    """Return the factor of an orthogonalised matrix (Jordan 2024; Liu 2025, equation 4)."""
    return sqrt(max(1.0, rows / columns)) if section.scale == "aspect" else 0.2 * sqrt(max(rows, columns))
