"""Update rules by their names in the document."""

from podscale.jax.optim.base import Hyper, Rule, Updated
from podscale.jax.optim.build import build_optimizer, build_share
from podscale.jax.optim.lars import lars
from podscale.jax.optim.sgd import sgd
from podscale.jax.optim.share import Share

__all__ = ["Hyper", "Rule", "Share", "Updated", "build_optimizer", "build_share", "lars", "sgd"]
