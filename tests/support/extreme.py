"""Independent float64 NumPy oracles of the optimizers for extreme batches: NLCG and Neumann.

Their gradients depend on the weights: a noisy quadratic bowl with a different curvature for every weight.
"""

from typing import Any

import numpy as np

from tests.support.optimizer_oracles import SHAPES, STEPS, Arrays, Values, gradients, norm, rate, start

NORMS = frozenset({"gamma"})
"""Parameters that count as batch norm's."""
CURVATURES = {
    name: np.random.default_rng(7).uniform(0.3, 2.0, shape).astype(np.float32) for name, shape in SHAPES.items()
}


def bowl(weights: Arrays, step: int) -> Values:
    """Return the gradient at these weights."""
    noise = gradients(step)
    return {name: CURVATURES[name] * w + 0.1 * noise[name] for name, w in weights.items()}


def loss(step: int) -> float:
    """Return a loss that falls and rises by small and large amounts."""
    return float(2.0 * np.exp(0.4 * np.sin(0.35 * step) - 0.01 * step))


def together(arrays: Arrays) -> np.ndarray[Any, Any]:
    return np.concatenate([array.astype(np.float64).reshape(-1) for array in arrays.values()])


def apart(vector: np.ndarray[Any, Any]) -> Values:
    ends = np.cumsum([np.prod(shape) for shape in SHAPES.values()])[:-1]
    parts = np.split(vector, ends)
    return {name: part.reshape(shape) for part, (name, shape) in zip(parts, SHAPES.items(), strict=True)}


def decayed(weights: Values, step: int, decay: float, decays: dict[str, bool]) -> Values:
    return {name: g + decay * decays[name] * weights[name] for name, g in bowl(weights, step).items()}


def table_row(ratio: float, tolerance: float, growth: float) -> tuple[float, float]:
    """Return the factor of the base rate and the fraction of the direction to remove, by the published table."""
    if ratio > 1 + 0.15 * tolerance:
        return 0.5, 0.9
    if ratio > 1 + 0.125 * tolerance:
        return 0.7, 0.7
    if ratio > 1 + 0.10 * tolerance:
        return 0.8, 0.5
    if ratio > 1 + 0.075 * tolerance:
        return 0.9, 0.3
    if ratio > 1 + 0.05 * tolerance:
        return 0.95, 0.2
    if ratio > 1 + 0.025 * tolerance:
        return 0.975, 0.1
    if ratio > 1 + 0.01 * tolerance:
        return 1.0, 0.1
    return growth, 0.0


def nlcg_oracle(
    decay: float,
    decays: dict[str, bool],
    *,
    beta: str = "fletcher_reeves",
    mode: str = "step",
    tolerance: float = 1.0,
    lars: float = 0.0,
    norm_scale: float = 1.0,
    restart: int = 0,
    forget: int = 0,
) -> tuple[Values, float]:
    """Return the weights after all steps, and the base rate."""
    eps = 1e-8
    w = together(start())
    h = np.ones_like(w)
    d = g_old = s_old = np.zeros_like(w)
    rho_old = t_old = 0.0
    base = 1.0
    average = before = 0.0
    for step in range(STEPS):
        weights = apart(w)
        parts = decayed(weights, step, decay, decays)
        for name, part in parts.items():
            scale = norm_scale if name in NORMS else 1.0
            size = norm(weights[name])
            if lars and decays[name] and size:
                scale *= lars * size / (norm(scale * part) + eps + 0.1 * lars * size)
            parts[name] = scale * part
        g = together(parts)
        y, p = g - g_old, t_old * d
        ys, q = float(y @ p), float(p @ (h * p))
        if step and ys >= eps and q >= eps:
            h = np.abs(h - ((h * p) ** 2 + eps) / (q + eps) + (y * y + eps) / (ys + eps))
        if forget and step % forget == 0:
            h = np.ones_like(w)
        r = -g
        s = r / (h + eps)
        rho = float(r @ s)
        above = rho - (float(r @ s_old) if beta == "polak_ribiere" else 0.0)
        share = min(max(above / (rho_old + eps), 0.0), 1.0)
        if step == 0 or (restart and step % restart == 0):
            share = 0.0
        direction = s + share * d
        factor, removed = 1.0, 0.0
        now = loss(step)
        if step == 0:
            average = before = now
        else:
            behind = average
            average = 0.7 * average + 0.3 * now
            if mode == "step" and step % 5 == 0:
                factor, removed = table_row(average / before, tolerance, 1.05)
                before = average
            elif mode == "online":
                factor, removed = table_row(now / behind, tolerance, 1.02)
        base = min(max(base * factor, 1e-4), 1.0)
        t = rate(step) * base
        if removed and t:
            direction = ((1 - removed) * t * direction - removed * t_old * d) / t
        w = w + t * direction
        d, g_old, s_old, rho_old, t_old = direction, g, s, rho, t
    return apart(w), base


def ml_ncg_oracle(
    decay: float, decays: dict[str, bool], *, update_rule: str = "FR", line_search: str = "Step", lars_lr: float = -1.0
) -> tuple[Values, float]:
    """Return the weights and base_lr by apple/ml-ncg 563b5e5 (ncg_core_tfop.py), with its names, step by step.

    With lars_lr, parameters of zero norm keep their gradient, which the program sets to 0.
    """
    eps = 1e-8
    variables = together(start())
    h_diag = np.ones_like(variables)
    d = s = g_old = np.zeros_like(variables)
    rtd_new, base_lr = 0.0, 1.0
    loss_ema = loss_ema_old = 0.0
    for global_step in range(STEPS):
        lr, weights = rate(global_step), apart(variables)
        grads = decayed(weights, global_step, decay, decays)
        if lars_lr > 0:
            for name, v in weights.items():
                if norm(v):
                    grads[name] = lars_lr * norm(v) / (norm(grads[name]) + eps + 0.1 * lars_lr * norm(v)) * grads[name]
        g = together(grads)
        if global_step > 0:
            y, p = g - g_old, d * (lr * base_lr)
            ys, p_h_p = y @ p, p @ (h_diag * p)
            if not (ys < eps or p_h_p < eps):
                correction = (h_diag * p * p * h_diag + eps) / (p_h_p + eps)
                h_diag = np.abs(h_diag - correction + (y * y + eps) / (ys + eps))
        h_inverse = 1.0 / (h_diag + eps)
        g_old, r = g, -g
        s_new = h_inverse * r
        rtd_old, rtd_new = rtd_new, r @ s_new
        d_old = d
        if global_step == 0:
            d = s_new
        else:
            beta = (rtd_new - r @ s if update_rule == "PR" else rtd_new) / (rtd_old + eps)
            d = s_new + min(max(beta, 0.0), 1.0) * d_old
        s, applied = s_new, d
        now = loss(global_step)
        loss_ema = now if global_step == 0 else 0.7 * loss_ema + 0.3 * now
        if global_step == 0:
            loss_ema_old = now
        elif line_search == "Online" or (line_search == "Step" and global_step % 5 == 0):
            ratio = now / loss_ema if line_search == "Online" else loss_ema / loss_ema_old
            growth = 1.02 if line_search == "Online" else 1.05
            degrade, removed = table_row(ratio, 1.0, growth)
            t_old = lr * base_lr
            base_lr = max(base_lr * degrade, 1e-4) if ratio >= 1.01 else min(base_lr * degrade, 1.0)
            t_new = lr * base_lr
            if removed and t_new > eps:
                applied = ((1.0 - removed) * t_new * d - removed * t_old * d_old) / t_new
            if line_search == "Step":
                loss_ema_old = loss_ema
        variables = variables + lr * base_lr * applied
    return apart(variables), base_lr


def neumann_oracle(
    decay: float, decays: dict[str, bool], section: Any, sgd_updates: int, period: int, per_epoch: float
) -> tuple[Values, Values]:
    """Return the stored weights after all steps, and the point reached."""
    w = together(start())
    v, m = w.copy(), np.zeros_like(w)
    mu, next_reset, since = 0.0, 1, 0
    for step in range(STEPS):
        eta = rate(step)
        g = together(decayed(apart(w), step, decay, decays))
        t = step - sgd_updates + 1
        if t < 1:
            w = w - eta * g
            continue
        counted = {"updates": t, "since_reset": t - since, "epochs": t / per_epoch}[section.momentum_time]
        mu = min(max(1 - 1 / (1 + counted), section.momentum_start), section.momentum_end)
        if t == next_reset:
            before, m = m, -eta * g
            next_reset, period, since = t + period, 2 * period, t
            if section.on_reset == "hold":
                continue
            d = g
        else:
            distance = float(np.linalg.norm(w - v))
            pull = section.alpha * distance**2 - section.beta * len(w) / distance**2 if distance else 0.0
            d = g + (pull * (w - v) / distance if distance else 0.0)
            before, m = m, mu * m - eta * d
        w = w + mu * (m if section.moves_by == "current" else before) - eta * d
        v = w + section.gamma * (v - w)
    return apart(w), apart(w - mu * m)
