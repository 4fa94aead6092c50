"""RMSProp (Hinton 2012, lecture 6e) with momentum, a baseline: that of Inception's training (Szegedy 2016).

d = g + weight_decay * w;  v = decay * v + (1 - decay) * d^2;  u = d / (sqrt(v) + eps), then momentum (see `move`).

| as in      | v starts at | eps         | form     |
|------------|-------------|-------------|----------|
| torch      | 0           | beside root | scaled   |
| TensorFlow | 1           | in the root | unscaled |
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from podscale.jax.gradients import Buckets
from podscale.jax.optim.base import Hyper, Kept, Updated
from podscale.jax.optim.moments import quotient
from podscale.jax.optim.momentum import Form, decayed, factors, move
from podscale.jax.optim.share import Share

Variant = Literal["torch", "tensorflow"]


def rmsprop(
    share: Share,
    weights: Buckets,
    gradients: Buckets,
    kept: Kept,
    hyper: Hyper,
    finite: Array,
    *,
    decay: float = 0.9,
    eps: float = 1e-8,
    variant: Variant = "torch",
    form: Form = "scaled",
) -> Updated:
    """See the module's text; the form is free. Where v starts is for whoever makes the state: see `build.slots`."""
    finite, _ = share.agree(finite)
    directions, variances = [], []
    of_sum = decayed(share, weights, gradients, hyper.weight_decay)
    for d, v in zip(of_sum, kept.moments["variance"], strict=True):
        variance = decay * v + (1.0 - decay) * jnp.square(d)
        root = jnp.sqrt(variance) + eps if variant == "torch" else jnp.sqrt(variance + eps)
        directions.append(quotient(d, root))
        variances.append(jnp.where(finite, variance, v))
    both = factors(form, hyper.learning_rate, jnp.ones_like(hyper.learning_rate))
    momenta = kept.moments["momentum"]
    found = move(share, weights, tuple(directions), momenta, both, hyper, finite, nesterov=False)
    return found._replace(kept=Kept({**found.kept.moments, "variance": tuple(variances)}, {}))
