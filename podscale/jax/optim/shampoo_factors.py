"""Kronecker factors of Shampoo: blocks of arrays, statistics shared out over the devices, and their inverse roots.

Every dimension of every block has one factor, a symmetric matrix (see `podscale.pytorch.optim.shampoo_factors`). Blocks
of one shape are stacked. Factors of one size and root form a group, padded so that the devices divide it: a device
holds the statistics of its part, computes their roots, and gathers the roots of all (Anil 2020, section 5). So every
root is computed once and is bit-identical everywhere.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from podscale.config.optimizer import ShampooSection
from podscale.jax.flat_buffers import Values
from podscale.jax.mesh import REPLICATED, AxisNames
from podscale.jax.optim.base import ExtraStateLayout, exact_product
from podscale.models import Shape
from podscale.training.shampoo import (
    MAX_NEWTON_ERROR,
    NEWTON_ITERATIONS,
    NEWTON_TOLERANCE,
    merge_small_dims,
    partition_blocks,
    shampoo_dim_order,
)

KINDS = ("statistics", "roots")


class ReplicaAxes(NamedTuple):
    """Mesh axes of devices that hold the same weights and may share work, and their number."""

    axes: AxisNames = ()
    size: int = 1


class ArrayBlocks(NamedTuple):
    """Blocks of one array: `permuted` and `merged` are its shape in Shampoo's order, and without small dimensions."""

    shape: Shape
    permuted: Shape
    merged: Shape
    spans: tuple[tuple[tuple[int, int], ...], ...]

    def cut(self, array: Array) -> list[Array]:
        """Return the blocks of an array, in order."""
        merged = array.transpose(shampoo_dim_order(len(self.shape))).reshape(self.merged)
        return [merged[tuple(slice(*span) for span in spans)] for spans in self.spans]

    def join(self, blocks: Sequence[Array]) -> Array:
        """Return the array of these blocks: the inverse of `cut`."""
        for dim in reversed(range(len(self.merged))):
            length = len({spans[dim] for spans in self.spans})
            blocks = [jnp.concatenate(blocks[i : i + length], dim) for i in range(0, len(blocks), length)]
        return blocks[0].reshape(self.permuted).transpose(np.argsort(shampoo_dim_order(len(self.shape))))


def list_blocks(shapes: Mapping[str, Shape], section: ShampooSection) -> dict[str, ArrayBlocks]:
    """Return the blocks of each array that is preconditioned, by name."""
    found = {}
    for name, shape in shapes.items():
        if len(shape) > 1 or section.vectors:
            permuted = tuple(shape[dim] for dim in shampoo_dim_order(len(shape)))
            merged = merge_small_dims(permuted, section.block)
            found[name] = ArrayBlocks(shape, permuted, merged, tuple(partition_blocks(merged, section.block)))
    return found


class StackFactors(NamedTuple):
    """Factors of dimension `dim` of stack `stack`: from `start` on in a group, one for each block."""

    stack: int
    dim: int
    start: int


class FactorLayout(ExtraStateLayout):
    """Stacks of blocks, groups of factors, and their arrays on the devices and in a checkpoint.

    An array of the devices is `statistics/<group>` or `roots/<group>`, fp32 [factors, d, d]. One of a checkpoint is
    `statistics/<name>` or `roots/<name>`, a vector: the matrices of a parameter block by block, then dimension by
    dimension, each row by row, as in the PyTorch engine.
    """

    def __init__(self, shapes: Mapping[str, Shape], section: ShampooSection, replicas: ReplicaAxes) -> None:
        self.blocks, self.replicas = list_blocks(shapes, section), replicas
        stacks: dict[Shape, list[tuple[str, int]]] = {}
        for name, blocks in self.blocks.items():
            for number, spans in enumerate(blocks.spans):
                stacks.setdefault(tuple(stop - start for start, stop in spans), []).append((name, number))
        self.stacks = list(stacks.items())
        """Shape of the blocks of each stack, and the name and number of each block."""
        self.groups: dict[str, list[StackFactors]] = {}
        self.powers: dict[str, int] = {}
        self.array_shapes: dict[str, Shape] = {}
        """Shape of a group's unsharded arrays, [factors, d, d], padding included."""
        lengths = Counter[str]()
        for index, (shape, members) in enumerate(self.stacks):
            power = section.exponent or 2 * len(shape)
            for dim, size in enumerate(shape):
                group = f"{size}x{power}"
                self.groups.setdefault(group, []).append(StackFactors(index, dim, lengths[group]))
                lengths[group] += len(members)
                padded = -(-lengths[group] // replicas.size) * replicas.size
                self.powers[group], self.array_shapes[group] = power, (padded, size, size)

    @property
    def specs(self) -> Mapping[str, PartitionSpec]:
        statistics = PartitionSpec(self.replicas.axes) if self.replicas.axes else REPLICATED
        of_kinds = zip(KINDS, (statistics, REPLICATED), strict=True)
        return {f"{kind}/{group}": spec for kind, spec in of_kinds for group in self.groups}

    def initial(self) -> dict[str, Values]:
        arrays = {}
        for group, shape in self.array_shapes.items():
            arrays[f"statistics/{group}"] = np.zeros(shape, np.float32)
            arrays[f"roots/{group}"] = np.broadcast_to(np.eye(shape[1], dtype=np.float32), shape)
        return self.unpack(arrays)

    def pack(self, named: Mapping[str, Values]) -> dict[str, Values]:
        arrays: dict[str, Values] = {}
        for kind in KINDS:
            arrays |= {f"{kind}/{group}": np.zeros(shape, np.float32) for group, shape in self.array_shapes.items()}
            for name, matrices in self._addresses():
                vector, start = named[f"{kind}/{name}"], 0
                for group, row, size in matrices:
                    matrix = np.asarray(vector[start : start + size * size]).reshape(size, size)
                    arrays[f"{kind}/{group}"][row] = matrix
                    start += size * size
        return arrays

    def unpack(self, arrays: Mapping[str, Values]) -> dict[str, Values]:
        return {
            f"{kind}/{name}": np.concatenate([arrays[f"{kind}/{group}"][row].ravel() for group, row, _ in matrices])
            for kind in KINDS
            for name, matrices in self._addresses()
        }

    def _addresses(self) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
        """Yield each name, and group, row and size of its matrices in the order of a checkpoint."""
        by_block: dict[tuple[str, int], dict[int, tuple[str, int, int]]] = {}
        for group, factors in self.groups.items():
            size = self.array_shapes[group][1]
            for stack, dim, start in factors:
                for row, block in enumerate(self.stacks[stack][1], start):
                    by_block.setdefault(block, {})[dim] = (group, row, size)
        for name, blocks in self.blocks.items():
            of_name = [by_block[name, number] for number in range(len(blocks.spans))]
            yield name, [of_block[dim] for of_block in of_name for dim in sorted(of_block)]

    def stack_blocks(self, arrays: Mapping[str, Array]) -> list[Array]:
        """Return the blocks of each stack, [blocks, *shape], from unsharded `arrays` by name."""
        cut = {name: blocks.cut(arrays[name]) for name, blocks in self.blocks.items()}
        return [jnp.stack([cut[name][number] for name, number in members]) for _, members in self.stacks]

    def unstack_blocks(self, stacks: Sequence[Array]) -> dict[str, Array]:
        """Return the arrays that have blocks, by name: the inverse of `stack_blocks`.

        Args:
            stacks: blocks of each stack, fp32 [blocks, *shape].
        """
        placed = {
            block: stacks[index][row]
            for index, (_, members) in enumerate(self.stacks)
            for row, block in enumerate(members)
        }
        return {
            name: blocks.join([placed[name, number] for number in range(len(blocks.spans))])
            for name, blocks in self.blocks.items()
        }

    def accumulate(
        self, extra: Mapping[str, Array], stacks: Sequence[Array], beta2: float, finite: Array
    ) -> dict[str, Array]:
        """Return this device's statistics with the gradients of each stack added, if `finite` (bool scalar).

        A moving average, or with beta2 = 1 a sum. A square that overflows leaves its matrix as it is.

        Args:
            extra: this device's state, fp32 [factors, d, d] by name.
            stacks: gradients of each stack, fp32 [blocks, *shape].
        """
        weight = 1.0 if beta2 == 1.0 else 1.0 - beta2
        statistics = {}
        for group, factors in self.groups.items():
            squares = jnp.concatenate([_unfolded_squares(stacks[each.stack], each.dim) for each in factors])
            padding = self.array_shapes[group][0] - len(squares)
            old = extra[f"statistics/{group}"]
            new = beta2 * old + weight * self._local(jnp.pad(squares, ((0, padding), (0, 0), (0, 0))))
            statistics[f"statistics/{group}"] = _choose_finite_matrices(new, old, finite)
        return statistics

    def new_roots(self, extra: Mapping[str, Array], section: ShampooSection, finite: Array) -> dict[str, Array]:
        """Return the inverse roots of all factors from this device's statistics. All devices call it.

        Roots that fail, and all if not `finite` (bool scalar), stay as in `extra`.
        """
        roots = {}
        for group, power in self.powers.items():
            old = extra[f"roots/{group}"]
            local = inverse_root(extra[f"statistics/{group}"], power, section)
            new = lax.all_gather(local, self.replicas.axes, tiled=True) if self.replicas.axes else local
            roots[f"roots/{group}"] = _choose_finite_matrices(new, old, finite)
        return roots

    def precondition(self, extra: Mapping[str, Array], stacks: Sequence[Array]) -> list[Array]:
        """Return the blocks of each stack multiplied by their roots along every dimension.

        Args:
            extra: roots of all factors, fp32 [factors, d, d] by name.
            stacks: gradients of each stack, fp32 [blocks, *shape].
        """
        results = list(stacks)
        by_dim = sorted((*each, group) for group, factors in self.groups.items() for each in factors)
        for stack, _, start, group in by_dim:  # each product moves its dimension to the end
            blocks = results[stack]
            count, size, *others = blocks.shape
            roots = extra[f"roots/{group}"][start : start + count]
            unfolded = blocks.reshape(count, size, -1)
            product = jnp.einsum("bij,bik->bjk", unfolded, roots, precision=lax.Precision.HIGHEST)
            results[stack] = product.reshape(count, *others, size)
        return results

    def _local(self, matrices: Array) -> Array:
        """Return this device's part of the matrices of a group."""
        if not self.replicas.axes:
            return matrices
        length = len(matrices) // self.replicas.size
        return lax.dynamic_slice_in_dim(matrices, lax.axis_index(self.replicas.axes) * length, length)


def _unfolded_squares(blocks: Array, dim: int) -> Array:
    """Return G G^T of each block unfolded along `dim`, [blocks, d, d]."""
    unfolded = jnp.moveaxis(blocks, 1 + dim, 1).reshape(len(blocks), blocks.shape[1 + dim], -1)
    return jnp.einsum("bij,bkj->bik", unfolded, unfolded, precision=lax.Precision.HIGHEST)


def _choose_finite_matrices(new: Array, old: Array, finite: Array) -> Array:
    """Return the finite matrices of `new` if the step is `finite` (bool scalar), and the others of `old`."""
    is_chosen = jnp.isfinite(new).all((1, 2)) & finite
    return jnp.where(is_chosen[:, None, None], new, old)


def inverse_root(matrices: Array, power: int, section: ShampooSection) -> Array:
    """Return (S + eps I) ^ (-1 / power) of matrices S [n, d, d], in their dtype; NaN on failure.

    Computes in the section's `roots_precision`; JAX has fp64 only if it is enabled while the program is traced.
    """
    with jax.enable_x64(True):
        dtype: DTypeLike = {"fp32": jnp.float32, "fp64": jnp.float64}[section.roots_precision]
        damped = matrices.astype(dtype)
        damped = (damped + damped.mT) * np.array(0.5, dtype) + np.eye(damped.shape[-1], dtype=dtype) * section.eps
        by_eigh = section.roots == "eigh"
        roots = _root_by_eigh(damped, power, section.eps) if by_eigh else _root_by_newton(damped, power, dtype)
        return roots.astype(matrices.dtype)


def _root_by_eigh(damped: Array, power: int, eps: float) -> Array:
    """Return the roots by eigenvalues, clamped to eps, because rounding may leave the smallest a little below it."""
    values, vectors = lax.platform_dependent(damped, cpu=_eigh_one_by_one, default=_eigh)
    scaled = vectors * (jnp.maximum(values, eps) ** (-1.0 / power))[..., None, :]
    return jnp.einsum("bij,bkj->bik", scaled, vectors, precision=lax.Precision.HIGHEST)


def _eigh(matrices: Array) -> tuple[Array, Array]:
    """Return eigenvalues [..., d] and eigenvectors [..., d, d] of symmetric matrices [..., d, d]."""
    values, vectors = jnp.linalg.eigh(matrices)
    return values, vectors


def _eigh_one_by_one(matrices: Array) -> tuple[Array, Array]:
    """Return the same as `_eigh`, of matrices [n, d, d] in a loop.

    On CPUs, `eigh` of several matrices keeps a thread of XLA's pool until other threads of it have done its parts. If
    as many calls run at the same time as there are threads, of several groups or of several devices of one process,
    none ends (jaxlib 0.10.2).
    """
    values, vectors = lax.map(_eigh, matrices)
    return values, vectors


def _root_by_newton(damped: Array, power: int, dtype: DTypeLike) -> Array:
    """Return the roots by a coupled Newton iteration (see the PyTorch engine's, which has the equations)."""
    one = jnp.eye(damped.shape[-1], dtype=dtype)
    z = (1 + power) / (2 * jnp.sqrt(jnp.square(damped).sum((1, 2))))[:, None, None]

    def iterate(_: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        m, h, error = carry
        t = ((power + 1) * one - m) / power
        running = error > NEWTON_TOLERANCE[jnp.dtype(dtype).itemsize]
        m = jnp.where(running, exact_product(_matrix_power(t, power), m), m)
        h = jnp.where(running, exact_product(h, t), h)
        return m, h, _distance(m, one)

    m = damped * z
    start = m, one * z ** (1.0 / power), _distance(m, one)
    _, h, error = lax.fori_loop(0, NEWTON_ITERATIONS, iterate, start)
    return jnp.where(error < MAX_NEWTON_ERROR, (h + h.mT) / 2, jnp.nan)


def _matrix_power(matrices: Array, power: int) -> Array:
    """Return the power by squaring, from the lowest bit up."""
    result: Array | None = None
    while power:
        if power & 1:
            result = matrices if result is None else exact_product(result, matrices)
        power >>= 1
        matrices = exact_product(matrices, matrices) if power else matrices
    assert result is not None
    return result


def _distance(m: Array, one: Array) -> Array:
    return jnp.abs(m - one).max((-2, -1), keepdims=True)
