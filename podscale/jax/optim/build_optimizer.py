"""Construction of the optimizer and its parameter shard from the document's optimizer section."""

from functools import partial

from podscale import models
from podscale.config.optimizer import JAX_OPTIMIZERS, OptimizerSection
from podscale.errors import InputError
from podscale.jax.all_reduce import AllReduce
from podscale.jax.flat_buffers import ParamLayout
from podscale.jax.optim.adaptive import adam, lamb, rmsprop
from podscale.jax.optim.base import ParamShard, UpdateRule
from podscale.jax.optim.lars import lars
from podscale.jax.optim.sgd import sgd
from podscale.training.param_layout import param_options
from podscale.util.formatting import join_words


def build_optimizer(section: OptimizerSection) -> UpdateRule:
    """The update rule of a document. Raises InputError for one that this engine does not have."""
    match section.name:
        case "sgd":
            return partial(sgd, nesterov=section.nesterov, form=section.effective_momentum_form)
        case "lars":
            return partial(
                lars,
                nesterov=section.nesterov,
                trust_coefficient=section.trust_coefficient,
                eps=section.effective_eps,
                trust=section.trust,
                form=section.effective_momentum_form,
                clip=section.trust_clip,
            )
        case "lamb":
            return partial(
                lamb,
                beta2=section.beta2,
                eps=section.effective_eps,
                clip_norm=section.clip_norm,
                clip=section.trust_clip,
            )
        case "adam":
            return partial(adam, beta2=section.beta2, eps=section.effective_eps, decoupled=section.adam.decoupled)
        case "rmsprop":
            own = section.rmsprop
            return partial(
                rmsprop,
                decay=own.decay,
                eps=section.effective_eps,
                variant=own.variant,
                form=section.effective_momentum_form,
            )
        case other:
            raise InputError(
                f"the JAX engine has {join_words(JAX_OPTIMIZERS)}",
                field="train.optimizer.name",
                got=other,
                hint="Choose one.",
            )


def initial_moments(section: OptimizerSection) -> dict[str, float]:
    """What the rule keeps of every weight, by name, and the value that it begins with."""
    if section.name not in ("lamb", "adam", "rmsprop"):
        return {"momentum": 0.0}
    ones = section.name == "rmsprop" and section.rmsprop.variant == "tensorflow"
    return {"momentum": 0.0, "variance": 1.0 if ones else 0.0}


def scalar_names(section: OptimizerSection) -> tuple[str, ...]:
    """What it keeps besides: scalars, which begin at 0."""
    return ("updates",) if section.name in ("lamb", "adam") else ()


def build_param_shard(
    section: OptimizerSection, layout: ParamLayout, spec: models.ModelSpec, scattered: AllReduce | None = None
) -> ParamShard:
    """What this device updates; `scattered` is what cuts buckets into shards, None where there are none.

    Raises InputError where a pattern of the skip list matches nothing.
    """
    treated = param_options(section, spec)
    return ParamShard(layout, treated, scattered.axes, scattered.shards) if scattered else ParamShard(layout, treated)
