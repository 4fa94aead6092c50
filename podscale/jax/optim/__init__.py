"""Optimizers by their names in the document."""

from podscale.jax.optim.adaptive import Adam, Lamb, RmsProp
from podscale.jax.optim.base import HyperParams, Optimizer, OptState, ParamShard
from podscale.jax.optim.build_optimizer import build_optimizer, build_param_shard
from podscale.jax.optim.lars import Lars
from podscale.jax.optim.sgd import Sgd

__all__ = [
    "Adam",
    "HyperParams",
    "Lamb",
    "Lars",
    "OptState",
    "Optimizer",
    "ParamShard",
    "RmsProp",
    "Sgd",
    "build_optimizer",
    "build_param_shard",
]
