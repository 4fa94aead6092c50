"""Independent oracle of Muon in float64 NumPy: the iteration acts on singular values, not on matrices."""

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from tests.support.optimizer_oracles import Arrays, Step, Values
from tests.support.shampoo_oracle import Array


def muon_oracle(
    weights: Arrays,
    steps: Iterable[Step],
    decays: Mapping[str, bool],
    orthogonalised: Collection[str],
    *,
    nesterov: bool = False,
    iterations: int = 5,
    scale: str = "aspect",
    other_rate: float = 1.0,
) -> Values:
    """Return the weights after these steps; `orthogonalised` has the names of the matrices."""
    found = {name: array.astype(np.float64) for name, array in weights.items()}
    momenta = {name: np.zeros_like(array) for name, array in found.items()}
    for step in steps:
        for name in found if step.finite else ():
            gradient = step.gradients[name].astype(np.float64)
            momenta[name] = step.momentum * momenta[name] + gradient
            update = gradient + step.momentum * momenta[name] if nesterov else momenta[name]
            rate = step.rate if name in orthogonalised else step.rate * other_rate
            if name in orthogonalised:
                update = orthogonal(update, iterations, scale)
            found[name] = found[name] - rate * update - rate * step.decay * decays[name] * found[name]
    return found


def orthogonal(update: Array, iterations: int, scale: str) -> Array:
    rows, columns = update.shape[0], update[0].size
    left, values, right = np.linalg.svd(update.reshape(rows, columns), full_matrices=False)
    values = values / (np.sqrt((values**2).sum()) + 1e-7)
    for _ in range(iterations):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    factor = max(1.0, rows / columns) ** 0.5 if scale == "aspect" else 0.2 * max(rows, columns) ** 0.5
    product: Array = factor * (left * values) @ right
    return product.reshape(update.shape)
