"""Construction of the optimizer and its parameter shard from the document's optimizer section."""

import torch
from torch import Tensor

from podscale import models
from podscale.config.optimizer import OptimizerSection
from podscale.pytorch.all_reduce import ShardedAllReduce
from podscale.pytorch.flat_buffers import GradientBuffer
from podscale.pytorch.optim.adaptive import Adam, Lamb, RmsProp
from podscale.pytorch.optim.base import Optimizer, ReplicaGroup
from podscale.pytorch.optim.lars import Lars
from podscale.pytorch.optim.neumann import Neumann
from podscale.pytorch.optim.nlcg import Nlcg
from podscale.pytorch.optim.param_shard import ParamShard, ParamSlice
from podscale.pytorch.optim.sgd import Sgd
from podscale.pytorch.optim.shampoo import Shampoo
from podscale.training.param_layout import param_options


def build_optimizer(
    section: OptimizerSection, shard: ParamShard, steps_per_epoch: float, replica_group: ReplicaGroup | None = None
) -> Optimizer:
    """Build the optimizer of a document over this rank's shard of the weights.

    Args:
        shard: weights and gradients of this rank.
        steps_per_epoch: steps of one pass over the training split.
        replica_group: ranks that may share work; default: this rank alone.
    """
    match section.name:
        case "sgd":
            return Sgd(shard, nesterov=section.nesterov, form=section.effective_momentum_form)
        case "lars":
            return Lars(
                shard,
                nesterov=section.nesterov,
                trust_coefficient=section.trust_coefficient,
                eps=section.effective_eps,
                trust=section.trust,
                form=section.effective_momentum_form,
                clip=section.trust_clip,
            )
        case "lamb":
            return Lamb(
                shard,
                beta2=section.beta2,
                eps=section.effective_eps,
                clip_norm=section.clip_norm,
                clip=section.trust_clip,
            )
        case "adam":
            return Adam(shard, beta2=section.beta2, eps=section.effective_eps, decoupled=section.adam.decoupled)
        case "rmsprop":
            own = section.rmsprop
            return RmsProp(
                shard,
                decay=own.decay,
                eps=section.effective_eps,
                variant=own.variant,
                form=section.effective_momentum_form,
            )
        case "shampoo":
            return build_shampoo(section, shard, replica_group or ReplicaGroup())
        case "nlcg":
            return Nlcg(
                shard,
                beta=section.nlcg.beta,
                pace=section.nlcg.step,
                tolerance=section.nlcg.tolerance,
                lars_coefficient=section.nlcg.lars_coefficient,
                norm_gradient_scale=section.nlcg.norm_gradient_scale,
                restart_every=section.nlcg.restart_every,
                forget_every=section.nlcg.forget_every,
            )
        case "neumann":
            return Neumann(shard, section.neumann, steps_per_epoch)


def build_shampoo(section: OptimizerSection, shard: ParamShard, replica_group: ReplicaGroup) -> Shampoo:
    own = section.shampoo
    return Shampoo(
        shard,
        replica_group,
        nesterov=section.nesterov,
        beta2=own.beta2,
        eps=own.eps,
        block=own.block,
        vectors=own.vectors,
        exponent=own.exponent,
        start=own.start_step,
        every=own.every_steps,
        graft=own.graft,
        graft_eps=own.graft_eps,
        roots=own.roots,
        dtype={"fp32": torch.float32, "fp64": torch.float64}[own.roots_precision],
    )


def build_param_shard(
    section: OptimizerSection,
    buffer: GradientBuffer,
    masters: Tensor,
    spec: models.ModelSpec,
    sharded_all_reduce: ShardedAllReduce | None = None,
) -> ParamShard:
    """Build this rank's parameter shard.

    Args:
        buffer: gradients and their layout.
        masters: fp32 weights that this rank steps.
        spec: model spec.
        sharded_all_reduce: gathers the shards; None if every rank steps all weights.
    """
    return ParamShard(
        build_param_slices(section, buffer, spec),
        buffer.local_ranges,
        masters,
        buffer.flat,
        RowSum(sharded_all_reduce) if sharded_all_reduce else None,
    )


def build_param_slices(section: OptimizerSection, buffer: GradientBuffer, spec: models.ModelSpec) -> list[ParamSlice]:
    """Return the slices of all parameters with their options, in the order of the model.

    Raises InputError if a pattern of the skip list matches nothing.
    """
    options, views = param_options(section, spec), dict(zip(buffer.parameters, buffer.views, strict=True))
    norms = {parameter.name for parameter in spec.parameters if parameter.role == "norm"}
    return [
        ParamSlice(
            name,
            start,
            views[name].numel(),
            *options[name],
            is_batch_norm=name in norms,
            shape=tuple(views[name].shape),
            strides=views[name].stride(),
        )
        for name, start in buffer.offsets.items()
    ]


class RowSum:
    """Sum of fp64 values over the ranks that share one set of weights.

    Values are gathered and then added by each rank in the same order: an all-reduce may add in another order in another
    row, and the weights of two rows would differ in their last bits.
    """

    def __init__(self, sharded_all_reduce: ShardedAllReduce) -> None:
        self._sharded_all_reduce = sharded_all_reduce

    def __call__(self, values: Tensor) -> Tensor:
        gathered = values.new_empty(self._sharded_all_reduce.shards * len(values))
        self._sharded_all_reduce.all_gather(values, gathered)
        return gathered.view(self._sharded_all_reduce.shards, -1).sum(0)
