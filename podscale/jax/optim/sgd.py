"""Stochastic gradient descent with momentum, Nesterov's form on request (Sutskever 2013, section 2)."""

import jax.numpy as jnp
from jax import Array

from podscale.jax.gradients import Buckets
from podscale.jax.optim.base import Hyper, Kept, Updated
from podscale.jax.optim.momentum import Form, decayed, factors, move
from podscale.jax.optim.share import Share


def sgd(
    share: Share,
    weights: Buckets,
    gradients: Buckets,
    kept: Kept,
    hyper: Hyper,
    finite: Array,
    *,
    nesterov: bool,
    form: Form = "scaled",
) -> Updated:
    """d = g + weight_decay * w, then momentum (see `move`), scaled by default as in torch and in Goyal 2017.

    Scaled: m = momentum * m + d;  w -= rate * (d + momentum * m if nesterov else m). Unscaled, the rate stands inside
    the buffer, and a schedule of the momentum can correct for its changes (Goyal 2017, section 3; Codreanu 2017).
    """
    finite, _ = share.agree(finite)
    both = factors(form, hyper.learning_rate, jnp.ones_like(hyper.learning_rate))
    directions = decayed(share, weights, gradients, hyper.weight_decay)
    return move(share, weights, directions, kept.moments["momentum"], both, hyper, finite, nesterov=nesterov)
