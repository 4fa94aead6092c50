"""Steps for comparing update rules, and independent float64 NumPy oracles of the rules."""

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Values = dict[str, np.ndarray[Any, Any]]
Arrays = Mapping[str, np.ndarray[Any, Any]]

SHAPES = {"conv": (8, 4, 3, 3), "gamma": (8,), "fc": (5, 8), "zero": (6, 6), "large": (40_000,)}
DECAYS = {"conv": True, "gamma": False, "fc": True, "zero": True, "large": True}
EVERYTHING = dict.fromkeys(SHAPES, True)
STEPS = 50


def start() -> Values:
    """Return initial weights; one array is all zeros, whose norm gives no trust ratio."""
    generator = np.random.default_rng(0)
    weights = {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    weights["zero"][:] = 0
    return weights


@cache
def gradients(step: int) -> Values:
    generator = np.random.default_rng(1000 + step)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def rate(step: int) -> float:
    """Return a learning rate that starts at 0 and changes in every step, to distinguish the forms of momentum."""
    return 0.1 * min(step, 10) / 10 + 0.05 * abs(float(np.sin(step)))


def momentum(step: int) -> float:
    return 0.9 - 0.2 * (step % 3 == 0)


class Step(NamedTuple):
    """Averaged gradients and hyperparameters of a step; if not `finite`, it is masked."""

    gradients: Arrays
    rate: float
    momentum: float
    decay: float
    finite: bool = True


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Values:
    """Return arrays of these shapes with normally distributed values."""
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def draw_steps(shapes: Mapping[str, tuple[int, ...]], decay: float, masked: Collection[int]) -> list[Step]:
    """Return `STEPS` steps; the gradients of the array `zero` are 0."""
    found = [Step(draw(shapes, 1000 + n), rate(n), momentum(n), decay, n not in masked) for n in range(STEPS)]
    for step in found:
        step.gradients["zero"][:] = 0
    return found


def compare(actual: Values, expected: Arrays) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=2e-5, atol=2e-5, err_msg=name)


def norm(x: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt((x.astype(np.float64) ** 2).sum()))


def trust_ratio(
    w: np.ndarray[Any, Any], g: np.ndarray[Any, Any], decay: float, eta: float, eps: float, trust: str
) -> float:
    if trust == "sum_of_norms":
        below, zero = norm(g) + decay * norm(w), norm(g) == 0
    else:
        below, zero = norm(g + decay * w), norm(g + decay * w) == 0
    return 1.0 if zero or norm(w) == 0 else eta * norm(w) / (below + eps)


def momentum_oracle(
    ratio_of: Any, form: str, nesterov: bool, decay: float, decays: dict[str, bool], adapts: dict[str, bool]
) -> Values:
    """Return the weights of momentum SGD; `ratio_of(w, g, decay, rate)` is the trust ratio of an adapted parameter."""
    weights = {name: w.astype(np.float64) for name, w in start().items()}
    buffers = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in range(STEPS):
        for name, g in gradients(step).items():
            w, g, own_decay = weights[name], g.astype(np.float64), decay * decays[name]
            ratio = ratio_of(w, g, own_decay, rate(step)) if adapts[name] else 1.0
            inside, outside = {
                "unscaled": (rate(step) * ratio, 1.0),
                "scaled": (1.0, rate(step) * ratio),
                "ratio_inside": (ratio, rate(step)),
            }[form]
            u = inside * (g + own_decay * w)
            buffers[name] = momentum(step) * buffers[name] + u
            weights[name] = w - outside * (u + momentum(step) * buffers[name] if nesterov else buffers[name])
    return weights


def google_lars_2018(decay: float, eta: float, eps: float, batch_norm: set[str], biases: set[str]) -> Values:
    """Return the weights by the code that Google had public in 2018.

    tensorflow/tpu f4fa4d7, resnet_main.py: loss = cross entropy + decay x the sum of w^2 / 2 over all variables but
    batch norm's. tensorflow 5c8077a, lars_optimizer.py: ratio = eta |w| / (|gradient| + decay |w| + eps), 1 for batch
    norm, biases and norms of 0; then m = momentum m + gradient and w = w - rate x ratio x m.
    """
    weights = {name: w.astype(np.float64) for name, w in start().items()}
    slots = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in range(STEPS):
        for name, cross_entropy in gradients(step).items():
            w = weights[name]
            gradient = cross_entropy.astype(np.float64) + (0.0 if name in batch_norm else decay * w)
            w_norm, g_norm = np.sqrt(np.sum(w**2)), np.sqrt(np.sum(gradient**2))
            ratio = 1.0
            if name not in batch_norm | biases and w_norm > 0 and g_norm > 0:
                ratio = eta * w_norm / (g_norm + decay * w_norm + eps)
            slots[name] = momentum(step) * slots[name] + gradient
            weights[name] = w - rate(step) * ratio * slots[name]
    return weights


def lamb_oracle(decay: float, beta2: float, eps: float, clip_norm: float, clip: bool, adapts: Any) -> Values:
    weights = {name: w.astype(np.float64) for name, w in start().items()}
    m, v = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step in range(STEPS):
        grads = {name: g.astype(np.float64) for name, g in gradients(step).items()}
        global_norm = np.sqrt(sum(norm(g) ** 2 for g in grads.values()))
        beta1 = momentum(step)
        for name, g in grads.items():
            g = g / max(1.0, global_norm / clip_norm) if clip_norm else g
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g * g
            u = m[name] / (1 - beta1 ** (step + 1)) / (np.sqrt(v[name] / (1 - beta2 ** (step + 1))) + eps)
            u = u + decay * DECAYS[name] * weights[name]
            ratio = norm(weights[name]) / norm(u) if norm(weights[name]) and norm(u) else 1.0
            ratio = (min(ratio, 1.0) if clip else ratio) if adapts[name] else 1.0
            weights[name] = weights[name] - rate(step) * ratio * u
    return weights
