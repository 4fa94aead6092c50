"""Construction of the optimizer and its parameter shard from the document's optimizer section."""

from podscale import models
from podscale.config.optimizer import JAX_OPTIMIZERS, OptimizerSection
from podscale.errors import InputError
from podscale.jax.all_reduce import AllReduce
from podscale.jax.flat_buffers import ParamLayout
from podscale.jax.optim.adaptive import Adam, Lamb, RmsProp
from podscale.jax.optim.base import Optimizer, ParamShard
from podscale.jax.optim.lars import Lars
from podscale.jax.optim.sgd import Sgd
from podscale.training.param_layout import param_options
from podscale.util.formatting import join_words


def build_optimizer(section: OptimizerSection) -> Optimizer:
    """Build the optimizer of a document. Raises InputError if this engine does not have it."""
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
        case other:
            raise InputError(
                f"the JAX engine has {join_words(JAX_OPTIMIZERS)}",
                field="train.optimizer.name",
                got=other,
                hint="Choose one.",
            )


def build_param_shard(
    section: OptimizerSection, layout: ParamLayout, spec: models.ModelSpec, scattered: AllReduce | None = None
) -> ParamShard:
    """Build this device's parameter shard. Raises InputError if a pattern of the skip list matches nothing.

    `scattered` is the all-reduce that scatters the buckets; None if every device steps all weights.
    """
    options = param_options(section, spec)
    return ParamShard(layout, options, scattered.axes, scattered.shards) if scattered else ParamShard(layout, options)
