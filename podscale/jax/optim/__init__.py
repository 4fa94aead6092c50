"""Optimizers by their names in the document."""

from podscale.jax.optim.adaptive import Adam, Lamb, RmsProp
from podscale.jax.optim.base import HyperParams, LookaheadOptimizer, Optimizer, OptState, ParamShard
from podscale.jax.optim.build_optimizer import build_optimizer, build_param_shard
from podscale.jax.optim.lars import Lars
from podscale.jax.optim.muon import Muon
from podscale.jax.optim.neumann import Neumann
from podscale.jax.optim.nlcg import Nlcg
from podscale.jax.optim.sgd import Sgd
from podscale.jax.optim.shampoo import Shampoo
from podscale.jax.optim.shampoo_factors import FactorLayout, ReplicaAxes

__all__ = [
    "Adam",
    "FactorLayout",
    "HyperParams",
    "Lamb",
    "Lars",
    "LookaheadOptimizer",
    "Muon",
    "Neumann",
    "Nlcg",
    "OptState",
    "Optimizer",
    "ParamShard",
    "ReplicaAxes",
    "RmsProp",
    "Sgd",
    "Shampoo",
    "build_optimizer",
    "build_param_shard",
]
