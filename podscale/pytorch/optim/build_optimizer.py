"""Construction of the optimizer and its parameter shard from the document's optimizer section."""

from functools import partial

from torch import Tensor

from podscale import models
from podscale.config.optimizer import OptimizerSection
from podscale.errors import InputError
from podscale.pytorch.all_reduce import ShardedAllReduce
from podscale.pytorch.flat_buffers import GradientBuffer
from podscale.pytorch.optim.adaptive import Adam, Lamb, RmsProp
from podscale.pytorch.optim.base import Optimizer, ReplicaGroup
from podscale.pytorch.optim.lars import Lars
from podscale.pytorch.optim.muon import Muon
from podscale.pytorch.optim.neumann import Neumann
from podscale.pytorch.optim.nlcg import Nlcg
from podscale.pytorch.optim.param_shard import ParamShard, ParamSlice
from podscale.pytorch.optim.sgd import Sgd
from podscale.pytorch.optim.shampoo import Shampoo
from podscale.training.param_layout import param_options
from podscale.util.plugins import call_plugin, find_factory


def build_optimizer(
    section: OptimizerSection, shard: ParamShard, steps_per_epoch: float, replica_group: ReplicaGroup | None = None
) -> Optimizer:
    """Build the optimizer of a document over this rank's shard of the weights."""
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
            return RmsProp(
                shard,
                decay=section.rmsprop.decay,
                eps=section.effective_eps,
                variant=section.rmsprop.variant,
                form=section.effective_momentum_form,
            )
        case "shampoo":
            return Shampoo(shard, section.shampoo, replica_group or ReplicaGroup(), nesterov=section.nesterov)
        case "muon":
            return Muon(shard, section.muon, replica_group or ReplicaGroup(), nesterov=section.nesterov)
        case "nlcg":
            return Nlcg(shard, section.nlcg)
        case "neumann":
            return Neumann(shard, section.neumann, steps_per_epoch)
        case _:
            return _build_plugin(section, shard)


def _build_plugin(section: OptimizerSection, shard: ParamShard) -> Optimizer:
    """Build the optimizer of a plug-in, which gets the shard and its options."""
    plugin = find_factory("train.optimizer.name", section.name)
    optimizer = call_plugin(plugin, shard, options=section.options, options_field="train.optimizer.options")
    missing = [name for name in ("step", "moments", "scalars") if not hasattr(optimizer, name)]
    if missing:
        problem = f"{plugin} returns {type(optimizer).__name__}, which has no {missing[0]}"
        raise InputError(problem, field=plugin.option, got=section.name)
    built: Optimizer = optimizer
    return built


def build_param_shard(
    section: OptimizerSection,
    buffer: GradientBuffer,
    masters: Tensor,
    spec: models.ModelSpec,
    sharded_all_reduce: ShardedAllReduce | None = None,
) -> ParamShard:
    """Build this rank's parameter shard; `masters` are the fp32 weights that this rank steps."""
    return ParamShard(
        build_param_slices(section, buffer, spec),
        buffer.local_ranges,
        masters,
        buffer.flat,
        partial(sum_in_rank_order, sharded_all_reduce) if sharded_all_reduce else None,
    )


def build_param_slices(section: OptimizerSection, buffer: GradientBuffer, spec: models.ModelSpec) -> list[ParamSlice]:
    """Return the slices of all parameters, in model order. Raises InputError if a pattern of `skip` matches none."""
    options, views = param_options(section, spec), dict(zip(buffer.parameters, buffer.views, strict=True))
    norms = {parameter.name for parameter in spec.parameters if parameter.is_norm}
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


def sum_in_rank_order(sharded_all_reduce: ShardedAllReduce, values: Tensor) -> Tensor:
    """Return the sum of fp64 values over the ranks that share one set of weights, added in the same order by each.

    An all-reduce may add in another order in another row, and the weights of two rows would differ in their last bits.
    """
    gathered = values.new_empty(sharded_all_reduce.shards * len(values))
    sharded_all_reduce.all_gather(values, gathered)
    return gathered.view(sharded_all_reduce.shards, -1).sum(0)
