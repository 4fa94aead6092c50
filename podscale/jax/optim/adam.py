"""Adam (Kingma 2015), a baseline: decay as part of the gradient, as in torch, or beside it (AdamW; Loshchilov 2019)."""

from jax import Array

from podscale.jax.gradients import Buckets
from podscale.jax.optim.base import Hyper, Kept, Updated
from podscale.jax.optim.moments import direct
from podscale.jax.optim.momentum import decayed, moved
from podscale.jax.optim.share import Share


def adam(
    share: Share,
    weights: Buckets,
    gradients: Buckets,
    kept: Kept,
    hyper: Hyper,
    finite: Array,
    *,
    beta2: float = 0.999,
    eps: float = 1e-8,
    decoupled: bool = False,
) -> Updated:
    """w -= rate * u with the direction u of `moments.direct`, of g + weight_decay * w.

    decoupled: u of g alone, and w -= rate * weight_decay * w.
    """
    finite, _ = share.agree(finite)
    if not decoupled:
        gradients = decayed(share, weights, gradients, hyper.weight_decay)
    directions, kept = direct(gradients, kept, hyper.momentum, finite, beta2=beta2, eps=eps)
    if decoupled:
        directions = decayed(share, weights, directions, hyper.weight_decay)
    return Updated(moved(share, weights, directions, hyper.learning_rate, finite), kept, finite)
