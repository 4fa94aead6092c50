"""Update rules by their names in the document."""

from podscale.jax.optim.adam import adam
from podscale.jax.optim.base import HyperParams, OptState, UpdateResult, UpdateRule
from podscale.jax.optim.build import build_optimizer, build_param_shard, initial_moments, scalar_names
from podscale.jax.optim.lamb import lamb
from podscale.jax.optim.lars import lars
from podscale.jax.optim.rmsprop import rmsprop
from podscale.jax.optim.sgd import sgd
from podscale.jax.optim.share import ParamShard

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
