"""Update rules by their names in the document."""

from podscale.jax.optim.adam import adam
from podscale.jax.optim.base import Hyper, Kept, Rule, Updated
from podscale.jax.optim.build import build_optimizer, build_share, scalars, slots
from podscale.jax.optim.lamb import lamb
from podscale.jax.optim.lars import lars
from podscale.jax.optim.rmsprop import rmsprop
from podscale.jax.optim.sgd import sgd
from podscale.jax.optim.share import Share

__all__ = [
    "Hyper",
    "Kept",
    "Rule",
    "Share",
    "Updated",
    "adam",
    "build_optimizer",
    "build_share",
    "lamb",
    "lars",
    "rmsprop",
    "scalars",
    "sgd",
    "slots",
]
