"""Muon (Jordan 2024); `podscale.pytorch.optim.muon` has the equations.

Matrices of one shape are stacked and padded so that the devices divide them. A device orthogonalises its part, and all
devices gather the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from podscale.config.optimizer import MuonSection
from podscale.jax.flat_buffers import Buckets
from podscale.jax.optim.base import (
    HyperParams,
    Optimizer,
    OptimizerResult,
    OptState,
    ParamShard,
    as_rows,
    choose_finite,
    exact_product,
)
from podscale.jax.optim.shampoo_factors import ReplicaAxes
from podscale.training.muon import EPS, NEWTON_SCHULZ, matrix_shape, update_scale


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon (see the module). Every device steps all weights; the devices share the matrices."""

    section: MuonSection
    nesterov: bool
    replicas: ReplicaAxes

    def step(
        self,
        shard: ParamShard,
        weights: Buckets,
        gradients: Buckets,
        opt_state: OptState,
        hyper: HyperParams,
        finite: Array,
    ) -> OptimizerResult:
        old, layout = opt_state.moments["momentum"], shard.layout
        momenta = updates = tuple(hyper.momentum * m + g for m, g in zip(old, gradients, strict=True))
        if self.nesterov:
            updates = tuple(g + hyper.momentum * m for m, g in zip(momenta, gradients, strict=True))
        named = layout.unpack(updates)
        matrices = {name: array for name, array in named.items() if array.ndim > 1 and name in shard.trust_ratio_names}
        directions = layout.pack({**named, **self._orthogonalise(matrices)}, gradients[0].dtype)
        factors = [1.0 if name in matrices else self.section.other_rate for name in named]
        rates = hyper.learning_rate * jnp.array(factors, hyper.learning_rate.dtype)
        kept = 1.0 - rates * hyper.weight_decay * shard.uses_weight_decay
        rows = zip(weights, directions, shard.per_row(rates), shard.per_row(kept), strict=True)
        stepped = tuple((keep * as_rows(w) - rate * as_rows(d)).reshape(-1) for w, d, rate, keep in rows)
        moments = {"momentum": choose_finite(finite, momenta, old)}
        return OptimizerResult(choose_finite(finite, stepped, weights), opt_state._replace(moments=moments), finite)

    def _orthogonalise(self, named: Mapping[str, Array]) -> dict[str, Array]:
        """Return the scaled orthogonalised arrays by name."""
        stacks: dict[tuple[int, int], list[str]] = {}
        for name, array in named.items():
            stacks.setdefault(matrix_shape(array.shape), []).append(name)
        found = dict[str, Array]()
        for shape, names in stacks.items():
            local = self._local(jnp.stack([named[name].reshape(shape) for name in names]))
            local = update_scale(*shape, self.section) * newton_schulz(local, self.section)
            matrices = lax.all_gather(local, self.replicas.axes, tiled=True) if self.replicas.axes else local
            found |= {name: matrices[row].reshape(named[name].shape) for row, name in enumerate(names)}
        return found

    def _local(self, matrices: Array) -> Array:
        """Return this device's part of the matrices, [n, rows, columns], padded with zeros."""
        if not self.replicas.axes:
            return matrices
        length = -(-len(matrices) // self.replicas.size)
        padded = jnp.pad(matrices, ((0, length * self.replicas.size - len(matrices)), (0, 0), (0, 0)))
        return lax.dynamic_slice_in_dim(padded, lax.axis_index(self.replicas.axes) * length, length)


def newton_schulz(matrices: Array, section: MuonSection) -> Array:
    """Return nearly orthogonal matrices with the singular vectors of `matrices`, [n, rows, columns], in their dtype."""
    a, b, c = NEWTON_SCHULZ
    dtype: DTypeLike = {"fp32": matrices.dtype, "bf16": jnp.bfloat16}[section.precision]
    is_high = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_high else matrices).astype(dtype)
    x = x / (jnp.sqrt(jnp.square(x).sum((1, 2), keepdims=True)) + jnp.array(EPS, dtype))
    for _ in range(section.iterations):
        square = exact_product(x, x.mT)
        x = a * x + exact_product(b * square + c * exact_product(square, square), x)
    return (x.mT if is_high else x).astype(matrices.dtype)
