"""Distributed Shampoo with grafting (Gupta 2018; Anil 2020); `podscale.pytorch.optim.shampoo` has the equations."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from podscale.config.optimizer import ShampooSection
from podscale.jax.flat_buffers import Buckets
from podscale.jax.optim.base import (
    HyperParams,
    Optimizer,
    OptimizerResult,
    OptState,
    ParamShard,
    choose_finite,
    scale_arrays,
)
from podscale.jax.optim.sgd import MomentumUpdate, add_weight_decay
from podscale.jax.optim.shampoo_factors import FactorLayout


@dataclass(frozen=True)
class Shampoo(Optimizer):
    """Shampoo (see the module). Every device steps all weights; the devices share the inverse roots."""

    section: ShampooSection
    nesterov: bool
    extra_layout: FactorLayout

    @property
    def initial_moments(self) -> Mapping[str, float]:
        return {"momentum": 0.0} if self.section.graft == "sgd" else {"momentum": 0.0, "variance": 0.0}

    def step(
        self,
        shard: ParamShard,
        weights: Buckets,
        gradients: Buckets,
        opt_state: OptState,
        hyper: HyperParams,
        finite: Array,
    ) -> OptimizerResult:
        section, factors = self.section, self.extra_layout
        since_start = hyper.step - section.start_step
        named = shard.layout.unpack(gradients)
        stacks = factors.stack_blocks(named)
        statistics = factors.accumulate(opt_state.extra, stacks, section.beta2, finite)
        old_roots = {name: array for name, array in opt_state.extra.items() if name not in statistics}
        roots = lax.cond(
            (since_start >= 0) & (since_start % section.every_steps == 0),
            lambda: factors.new_roots({**old_roots, **statistics}, section, finite),
            lambda: old_roots,
        )
        grafted, moments = self._graft(gradients, opt_state.moments, finite)
        preconditioned = factors.unstack_blocks(factors.precondition(roots, stacks))
        unchanged = shard.layout.unpack(grafted)
        directions = shard.layout.pack({**unchanged, **preconditioned}, gradients[0].dtype)
        _, (graft_norms, norms) = shard.norms(finite, grafted, directions)
        ratio = jnp.where(norms > 0, graft_norms / norms, 1.0)
        scaled = scale_arrays(shard, directions, ratio)
        directions = tuple(jnp.where(since_start >= 0, a, b) for a, b in zip(scaled, grafted, strict=True))
        directions = add_weight_decay(shard, weights, directions, hyper.weight_decay)
        state = opt_state._replace(moments=moments, extra={**statistics, **roots})
        return MomentumUpdate("scaled", self.nesterov).step(shard, weights, directions, state, hyper, finite)

    def _graft(
        self, gradients: Buckets, moments: dict[str, Buckets], finite: Array
    ) -> tuple[Buckets, dict[str, Buckets]]:
        """Return the direction of the rule that is grafted on, and the moments.

        sgd: g. adagrad: v = v + g^2, rmsprop: v = beta2 * v + (1 - beta2) * g^2; both g / (sqrt(v) + eps).
        """
        section = self.section
        if section.graft == "sgd":
            return gradients, moments
        is_sum = section.graft == "adagrad" or section.beta2 == 1.0
        keep, add = (1.0, 1.0) if is_sum else (section.beta2, 1.0 - section.beta2)
        old = moments["variance"]
        variance = tuple(keep * v + add * g * g for g, v in zip(gradients, old, strict=True))
        variance = choose_finite(finite, variance, old)
        directions = tuple(g / (jnp.sqrt(v) + section.graft_eps) for g, v in zip(gradients, variance, strict=True))
        return directions, {**moments, "variance": variance}
