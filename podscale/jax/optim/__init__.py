"""Optimizers by their names in the document."""

from podscale.jax.optim.adaptive import adam, lamb, rmsprop
from podscale.jax.optim.base import HyperParams, OptState, ParamShard, UpdateResult, UpdateRule
from podscale.jax.optim.build_optimizer import build_optimizer, build_param_shard, initial_moments, scalar_names
from podscale.jax.optim.lars import lars
from podscale.jax.optim.sgd import sgd

__all__ = [
    "HyperParams",
    "OptState",
    "ParamShard",
    "UpdateResult",
    "UpdateRule",
    "adam",
    "build_optimizer",
    "build_param_shard",
    "initial_moments",
    "lamb",
    "lars",
    "rmsprop",
    "scalar_names",
    "sgd",
]
