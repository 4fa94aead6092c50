"""Independent oracle of Shampoo in float64 NumPy, block by block and index by index, as in its equations."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from tests.support.optimizer_oracles import Arrays, Step, Values

Array = np.ndarray[Any, Any]


def shampoo_oracle(weights: Arrays, steps: Iterable[Step], decays: Mapping[str, bool], **options: Any) -> Values:
    """Return the weights after these steps; the options are those of the rule."""
    rules = {name: Parameter(w, **options) for name, w in weights.items()}
    for number, step in enumerate(steps):
        for name, rule in rules.items():
            if step.finite:
                rule.move(number, step.gradients[name], step.rate, step.momentum, step.decay * decays[name])
    return {name: rule.weights for name, rule in rules.items()}


class Parameter:
    def __init__(
        self,
        weights: Array,
        *,
        nesterov: bool = True,
        beta2: float = 0.999,
        eps: float = 1e-6,
        block: int = 128,
        vectors: bool = True,
        exponent: int | None = None,
        start_step: int = 1,
        every_steps: int = 1,
        graft: str = "sgd",
        graft_eps: float = 1e-10,
    ) -> None:
        self.weights = weights.astype(np.float64)
        self.nesterov, self.beta2, self.eps, self.block = nesterov, beta2, eps, block
        self.preconditioned = vectors or weights.ndim > 1
        self.exponent, self.graft, self.graft_eps = exponent, graft, graft_eps
        self.start_step, self.every_steps = start_step, every_steps
        self.momentum, self.variance = np.zeros_like(self.weights), np.zeros_like(self.weights)
        self.statistics: dict[Any, Array] = {}
        self.roots: dict[Any, Array] = {}

    def move(self, number: int, gradient: Array, rate: float, momentum: float, decay: float) -> None:
        g = gradient.astype(np.float64)
        direction = self.grafted(g)
        if self.preconditioned:
            preconditioned = self.preconditioned_gradient(number, g)
            if number >= self.start_step and np.linalg.norm(preconditioned) > 0:
                direction = preconditioned * np.linalg.norm(direction) / np.linalg.norm(preconditioned)
        d = direction + decay * self.weights
        self.momentum = momentum * self.momentum + d
        self.weights = self.weights - rate * (d + momentum * self.momentum if self.nesterov else self.momentum)

    def grafted(self, g: Array) -> Array:
        if self.graft == "sgd":
            return g
        if self.graft == "adagrad":
            self.variance = self.variance + g * g
        else:
            self.variance = self.beta2 * self.variance + (1 - self.beta2) * g * g
        return g / (np.sqrt(self.variance) + self.graft_eps)

    def preconditioned_gradient(self, number: int, g: Array) -> Array:
        """Return the preconditioned gradient of a (height, width, inputs, outputs) filter, merged by hand below."""
        order = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[g.ndim]
        turned = g.transpose(order)
        tensor = np.ascontiguousarray(turned).reshape(self.merged(turned.shape))
        result = np.zeros_like(tensor)
        for block in self.places(tensor.shape):
            part = tensor[block]
            for dim in range(part.ndim):
                matrix = np.tensordot(part, part, axes=[[i for i in range(part.ndim) if i != dim]] * 2)
                key = (str(block), dim)
                old = self.statistics.get(key, np.zeros_like(matrix))
                share = 1.0 if self.beta2 == 1.0 else 1.0 - self.beta2
                self.statistics[key] = self.beta2 * old + share * matrix
                if number >= self.start_step and (number - self.start_step) % self.every_steps == 0:
                    self.roots[key] = self.inverse_root(self.statistics[key], self.exponent or 2 * part.ndim)
                root = self.roots.get(key, np.eye(len(matrix)))
                result[block] = np.moveaxis(np.tensordot(root, part if dim == 0 else result[block], (1, dim)), 0, dim)
        return result.reshape(turned.shape).transpose(np.argsort(order))

    def inverse_root(self, matrix: Array, power: int) -> Array:
        values, vectors = np.linalg.eigh(matrix + self.eps * np.eye(len(matrix)))
        return (vectors * np.maximum(values, self.eps) ** (-1 / power)) @ vectors.T

    def merged(self, shape: tuple[int, ...]) -> list[int]:
        sizes = [1]
        for size in shape:
            if sizes[-1] * size <= self.block:
                sizes[-1] *= size
            else:
                sizes.append(size)
        return [size for size in sizes if size > 1] or [1]

    def places(self, shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
        spans = [[slice(at, at + self.block) for at in range(0, size, self.block)] for size in shape]
        return product(*spans)
