"""Construction of the optimizer and its parameter shard from the document's optimizer section."""

from collections.abc import Mapping

from podscale import models
from podscale.config.optimizer import OptimizerSection
from podscale.jax.all_reduce import AllReduce
from podscale.jax.flat_buffers import ParamLayout
from podscale.jax.optim.adaptive import Adam, Lamb, RmsProp
from podscale.jax.optim.base import Optimizer, ParamShard
from podscale.jax.optim.lars import Lars
from podscale.jax.optim.muon import Muon
from podscale.jax.optim.neumann import Neumann
from podscale.jax.optim.nlcg import Nlcg
from podscale.jax.optim.sgd import Sgd
from podscale.jax.optim.shampoo import Shampoo
from podscale.jax.optim.shampoo_factors import FactorLayout, ReplicaAxes
from podscale.models import Shape
from podscale.training.param_layout import param_options


def build_optimizer(
    section: OptimizerSection, shapes: Mapping[str, Shape], steps_per_epoch: float, replicas: ReplicaAxes
) -> Optimizer:
    """Build the optimizer of a document for arrays of these `shapes`, by name."""
    eps, form = section.effective_eps, section.effective_momentum_form
    match section.name:
        case "sgd":
            return Sgd(section.nesterov, form)
        case "lars":
            return Lars(section.nesterov, section.trust_coefficient, eps, section.trust, form, section.trust_clip)
        case "lamb":
            return Lamb(section.beta2, eps, section.clip_norm, section.trust_clip)
        case "adam":
            return Adam(section.beta2, eps, section.adam.decoupled)
        case "rmsprop":
            return RmsProp(section.rmsprop.decay, eps, section.rmsprop.variant, form)
        case "muon":
            return Muon(section.muon, section.nesterov, replicas)
        case "nlcg":
            return Nlcg(section.nlcg)
        case "neumann":
            return Neumann(section.neumann, steps_per_epoch)
        case "shampoo":
            return Shampoo(section.shampoo, section.nesterov, FactorLayout(shapes, section.shampoo, replicas))
        case _:
            raise AssertionError(f"{section.name} is no optimizer of the JAX engine")  # check_engine_support refuses it


def build_param_shard(
    section: OptimizerSection, layout: ParamLayout, spec: models.ModelSpec, scattered: AllReduce | None = None
) -> ParamShard:
    """Build this device's parameter shard. Raises InputError if a pattern of the skip list matches nothing.

    `scattered` is the all-reduce that scatters the buckets; None if every device steps all weights.
    """
    axes, shards = (scattered.axes, scattered.shards) if scattered else ((), 1)
    norms = [parameter.name for parameter in spec.parameters if parameter.is_norm]
    return ParamShard(layout, param_options(section, spec), axes, shards, norms)
