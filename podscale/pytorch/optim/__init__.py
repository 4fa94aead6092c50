"""Update rules by their names in the document."""

from podscale.pytorch.optim.adam import Adam
from podscale.pytorch.optim.base import ExtraStateOptimizer, HyperParams, LookaheadOptimizer, Optimizer, StepAware
from podscale.pytorch.optim.build import build_optimizer, build_param_shard
from podscale.pytorch.optim.lamb import Lamb
from podscale.pytorch.optim.lars import Lars
from podscale.pytorch.optim.neumann import Neumann
from podscale.pytorch.optim.nlcg import Nlcg
from podscale.pytorch.optim.rmsprop import RmsProp
from podscale.pytorch.optim.sgd import Sgd
from podscale.pytorch.optim.shampoo import Shampoo
from podscale.pytorch.optim.share import ParamShard, ParamSlice

__all__ = [
    "Adam",
    "ExtraStateOptimizer",
    "HyperParams",
    "Lamb",
    "Lars",
    "LookaheadOptimizer",
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
