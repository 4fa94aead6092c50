"""Optimizers by their names in the document."""

from podscale.pytorch.optim.adaptive import Adam, Lamb, RmsProp
from podscale.pytorch.optim.base import ExtraStateOptimizer, HyperParams, LookaheadOptimizer, Optimizer, StepAware
from podscale.pytorch.optim.build_optimizer import build_optimizer, build_param_shard
from podscale.pytorch.optim.lars import Lars
from podscale.pytorch.optim.muon import Muon
from podscale.pytorch.optim.neumann import Neumann
from podscale.pytorch.optim.nlcg import Nlcg
from podscale.pytorch.optim.param_shard import ParamShard, ParamSlice
from podscale.pytorch.optim.sgd import Sgd
from podscale.pytorch.optim.shampoo import Shampoo

__all__ = [
    "Adam",
    "ExtraStateOptimizer",
    "HyperParams",
    "Lamb",
    "Lars",
    "LookaheadOptimizer",
    "Muon",
    "Neumann",
    "Nlcg",
    "Optimizer",
    "ParamShard",
    "ParamSlice",
    "RmsProp",
    "Sgd",
    "Shampoo",
    "StepAware",
    "build_optimizer",
    "build_param_shard",
]
