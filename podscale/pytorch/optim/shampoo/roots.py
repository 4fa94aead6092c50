"""Inverse roots of symmetric positive semi-definite matrices: (S + eps I) ^ (-1 / p), many of one size at a time.

| method | made of                                                | waits for the device     |
|--------|--------------------------------------------------------|--------------------------|
| eigh   | eigenvalues and eigenvectors                           | to learn whether it went |
| newton | products of a coupled iteration (Guo and Higham 2006)  | never                    |

eigh is exact to the dtype's rounding whatever p is. newton takes the number of iterations that a condition number of
1e14 needs, each masked once its matrix has converged; p is one of 1, 2, 4, 8, ... or any other whole number.
"""

from typing import Literal

import torch
from torch import Tensor

RootMethod = Literal["eigh", "newton"]

NEWTON_ITERATIONS = 60
"""Of newton: a small eigenvalue grows by (1 + 1/p) ^ p, at least twofold, in each; then a few quadratic ones."""
NEWTON_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Of newton: the largest difference from the identity at which a matrix has converged."""


def inverse_root(matrices: Tensor, power: int, eps: float, method: RootMethod, dtype: torch.dtype) -> Tensor:
    """(S + eps I) ^ (-1 / power) of fp32 matrices [n, d, d], computed in `dtype`; fp32, NaN where it failed."""
    if not matrices.numel():
        return matrices.clone()
    damped = matrices.to(dtype)
    damped = (damped + damped.mT) / 2 + eps * torch.eye(damped.shape[-1], dtype=dtype, device=damped.device)
    return (_root_by_eigh(damped, power, eps) if method == "eigh" else _root_by_newton(damped, power)).float()


def _root_by_eigh(damped: Tensor, power: int, eps: float) -> Tensor:
    """Rounding leaves some of the eigenvalues that are 0 a little below it: none counts as less than eps."""
    values, vectors = torch.linalg.eigh(damped)
    scaled = vectors * values.clamp(min=eps).pow(-1.0 / power)[..., None, :]
    root: Tensor = scaled @ vectors.mT
    return root


def _root_by_newton(damped: Tensor, power: int) -> Tensor:
    """M = A z and H = z^(1/p) I at first; T = ((p + 1) I - M) / p, M = T^p M and H = H T until M is the identity.

    z = (1 + p) / (2 |A|) brings all eigenvalues of M to between 0 and (1 + p) / 2, where the iteration converges. A
    matrix that has not after all iterations becomes NaN.
    """
    one = torch.eye(damped.shape[-1], dtype=damped.dtype, device=damped.device)
    z = (1 + power) / (2 * torch.linalg.matrix_norm(damped))[:, None, None]
    m, h = damped * z, one * z ** (1.0 / power)
    error = _distance(m, one)
    for _ in range(NEWTON_ITERATIONS):
        t = ((power + 1) * one - m) / power
        running = error > NEWTON_TOLERANCE[damped.dtype]
        m, h = torch.where(running, torch.linalg.matrix_power(t, power) @ m, m), torch.where(running, h @ t, h)
        error = _distance(m, one)
    return torch.where(error < 0.1, (h + h.mT) / 2, torch.nan)


def _distance(m: Tensor, one: Tensor) -> Tensor:
    return (m - one).abs().amax((-2, -1), keepdim=True)
