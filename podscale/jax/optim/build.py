"""From the document's optimizer section to the update rule and the share of the weights that it works on."""

from functools import partial

from podscale import models
from podscale.config.optimizer import OptimizerSection
from podscale.decay import treatments
from podscale.errors import InputError
from podscale.jax.allreduce import AllReduce
from podscale.jax.gradients import Layout
from podscale.jax.optim.base import Rule
from podscale.jax.optim.lars import lars
from podscale.jax.optim.sgd import sgd
from podscale.jax.optim.share import Share

SLOTS = {"sgd": ("momentum",), "lars": ("momentum",)}
"""What each rule keeps of every weight."""


def build_optimizer(section: OptimizerSection) -> Rule:
    """The update rule of a document. Raises InputError for one that this engine does not have."""
    match section.name:
        case "sgd":
            return partial(sgd, nesterov=section.nesterov, form=section.form)
        case "lars":
            return partial(
                lars,
                nesterov=section.nesterov,
                trust_coefficient=section.trust_coefficient,
                eps=section.added_eps,
                trust=section.trust,
                form=section.form,
                clip=section.trust_clip,
            )
        case other:
            raise InputError(f"train.optimizer.name {other}: the JAX engine has {' and '.join(SLOTS)}; choose one")


def build_share(
    section: OptimizerSection, layout: Layout, spec: models.ModelSpec, scattered: AllReduce | None = None
) -> Share:
    """What this device updates; `scattered` is what cuts buckets into shards, None where there are none.

    Raises InputError where a pattern of the skip list matches nothing.
    """
    treated = treatments(section, spec)
    return Share(layout, treated, scattered.axes, scattered.shards) if scattered else Share(layout, treated)
