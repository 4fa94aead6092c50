"""Train step: forward, backward, average over the devices, masked optimizer step; several steps in one program.

A program runs a given number of steps, up to the number of batches that it gets, in a loop on the device, so that the
host has time for dispatch; one program serves every number. The schedule is a table on the device, indexed by a step
counter on the device. State is donated: the new state takes the memory of the old.

If the optimizer step is sharded (Kumar 2019; Xu 2020), each device keeps its shard of weights and momentum, and a step
begins with the all-gather of the weights. So nothing is stored twice, and the compiler may compute the first layers
while weights of later ones are in flight.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax, nn, random
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podscale import models
from podscale.config import RunConfig
from podscale.config.batch_norm_groups import batch_norm_group
from podscale.errors import InputError
from podscale.jax.all_reduce import AllReduce, build_all_reduce
from podscale.jax.batch_norm import (
    BatchNorm,
    apply_statistics_change,
    assign_batch_norm_groups,
    running_statistics_weight,
    statistics_change,
)
from podscale.jax.device_prefetcher import BATCH_SPECS, GlobalBatches, normalise
from podscale.jax.flat_buffers import Buckets, ParamLayout, Values
from podscale.jax.mesh import GROUP, RANKS, REPLICATED, axis_size, put_sharded
from podscale.jax.models import build_model, choose_convolution
from podscale.jax.optim import HyperParams, Optimizer, OptState, build_optimizer, build_param_shard
from podscale.jax.precision import compute_dtype, exact_products
from podscale.training.param_layout import param_options


def smoothed_cross_entropy(logits: Array, labels: Array, smoothing: float) -> Array:
    """Return the mean cross entropy in fp32 with label smoothing (Szegedy 2016, section 7).

    Args:
        logits: [n, classes], any float dtype.
        labels: integers [n].
        smoothing: mass of the target that is spread over all classes.
    """
    log_probs = nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    of_labels = jnp.take_along_axis(log_probs, labels[:, None], axis=1).mean()
    return -(1.0 - smoothing) * of_labels - smoothing * log_probs.mean()


NamedArrays = Mapping[str, Any]
"""Arrays of the host or of a device by the model spec's names."""


class DeviceState(NamedTuple):
    """Training state on the devices.

    Args:
        weights: fp32 buckets (see `ParamLayout`), equal on all devices, or scattered if the optimizer step is sharded.
        opt_state: optimizer state; moments have the layout of the weights.
        statistics: batch norm's running statistics by the model spec's names.
        number: steps so far, masked ones included, int32.
    """

    weights: Buckets
    opt_state: OptState
    statistics: dict[str, Array]
    number: Array


class StepResults(NamedTuple):
    """Results of k steps, equal on all devices.

    Args:
        loss: mean over the global batch, fp32 [k].
        finite: False for masked steps, bool [k].
        grad_norm: L2 norm of the averaged gradient, fp32 [k]; None if the step is sharded and no device has all of it.
        status: maximum of the ranks' statuses (see `StepInputs`), int32 [4].
    """

    loss: Array
    finite: Array
    grad_norm: Array | None
    status: Array | None = None


class StepInputs(NamedTuple):
    """Inputs of a call from the host.

    Args:
        step_count: steps to run, int32.
        status: packed status of each rank, int32 [ranks, 4]; its maximum is an output (see `step_sync`).
    """

    step_count: Any
    status: Any


STATUS_SPEC = PartitionSpec(RANKS)
STATUS_LENGTH = 4
"""Length of a packed status, numbers."""


@dataclass(frozen=True)
class TrainStep:
    """Train step of a document on a mesh."""

    mesh: Mesh
    layout: ParamLayout
    specs: Any
    """Sharding of the state: a `DeviceState` of partition specs."""
    initial_moments: Mapping[str, float]
    """Initial value of each moment of the optimizer, by name."""
    run_steps: Callable[..., tuple[DeviceState, StepResults]]
    """Run steps: (state, batches, schedule, inputs) -> (state, results).

    The schedule is fp32 [steps, 3], replicated. The given state is donated. Without inputs: one step for each batch.
    """

    def init_state(
        self,
        parameters: NamedArrays,
        statistics: NamedArrays,
        number: int = 0,
        moments: Mapping[str, NamedArrays] | None = None,
        scalars: NamedArrays | None = None,
    ) -> DeviceState:
        """Return the state after `number` steps, on the devices, from values that every process has.

        Args:
            parameters: weights by name.
            statistics: batch norm's running statistics by name.
            number: steps done.
            moments: arrays by the weights' names for each moment of the optimizer; default: initial ones.
            scalars: scalar state of the optimizer; default: initial values.
        """
        fresh_moments, fresh_scalars = self.initial_optimizer_state()
        laid = {slot: self.layout.pack_on_host(named) for slot, named in (moments or fresh_moments).items()}
        packed: Any = DeviceState(
            self.layout.pack_on_host(parameters),  # type: ignore[arg-type]
            OptState(laid, dict(scalars or fresh_scalars)),  # type: ignore[arg-type]
            dict(statistics),
            np.asarray(number, np.int32),  # type: ignore[arg-type]
        )
        return self._put_on_mesh(packed)

    def initial_optimizer_state(self) -> tuple[dict[str, dict[str, Values]], dict[str, Values]]:
        """Return the optimizer state before the first step: moments by slot and name, and scalars."""
        shapes, names = self.layout.shapes.items(), self.specs.opt_state.scalars
        moments = {
            slot: {name: np.broadcast_to(np.float32(value), shape) for name, shape in shapes}
            for slot, value in self.initial_moments.items()
        }
        return moments, {name: np.zeros((), np.float32) for name in names}

    def put_batches(self, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.integer[Any]]) -> GlobalBatches:
        """Put batches of the host on the devices."""
        batches = GlobalBatches(images, labels.astype(np.int32))  # type: ignore[arg-type]
        shardings = jax.tree.map(partial(NamedSharding, self.mesh), BATCH_SPECS)
        return jax.device_put(batches, shardings)  # type: ignore[no-any-return]

    def named_arrays(self, buckets: Buckets) -> dict[str, Array]:
        """Return weights or moments of a state by the model spec's names, unsharded."""
        return self.layout.unpack(buckets)

    def _put_on_mesh(self, state: DeviceState) -> DeviceState:
        def place(value: Array, spec: PartitionSpec) -> Array:
            placed = put_sharded(np.asarray(value), NamedSharding(self.mesh, spec))
            return placed.copy()  # the caller's arrays must outlive the state, whose memory is given away

        return jax.tree.map(place, state, self.specs)  # type: ignore[no-any-return]


def build_train_step(config: RunConfig, mesh: Mesh, classes: int) -> TrainStep:
    """Build the step of a document. Raises InputError for options that the mesh or this engine does not support."""
    _check_step_options(config, mesh)
    train, spec = config.train, models.model_spec(config.model, classes)
    param_options(train.optimizer, spec)  # raises for a skip list that matches nothing
    optimizer, reduce = build_optimizer(train.optimizer), build_all_reduce(train.all_reduce, mesh)
    scattered = reduce if train.weight_update == "sharded" else None
    layout = build_layout(config, mesh, spec)
    begins = optimizer.initial_moments
    buckets = (PartitionSpec(scattered.axes) if scattered else REPLICATED,) * len(layout.lengths)
    moments: dict[str, Any] = dict.fromkeys(begins, buckets)
    others: dict[str, Any] = dict.fromkeys(optimizer.scalar_names, REPLICATED)
    of_specs: Any = DeviceState
    specs = of_specs(
        weights=buckets,
        opt_state=OptState(moments, others),
        statistics={buffer.name: REPLICATED for buffer in spec.buffers},
        number=REPLICATED,
    )
    called = jax.shard_map(
        _build_device_steps(config, mesh, spec, layout, optimizer, reduce, scattered),
        mesh=mesh,
        in_specs=(specs, BATCH_SPECS, REPLICATED, StepInputs(REPLICATED, STATUS_SPEC)),
        out_specs=(specs, REPLICATED),
        check_vma=False,  # the check does not know that the result of all_gather is replicated
    )

    def updates(
        state: DeviceState, batches: GlobalBatches, schedule: Array, call: StepInputs | None = None
    ) -> tuple[DeviceState, StepResults]:
        silence = StepInputs(
            jnp.int32(len(batches.labels)), jnp.zeros((axis_size(mesh, RANKS), STATUS_LENGTH), jnp.int32)
        )
        found: tuple[DeviceState, StepResults] = called(state, batches, schedule, call or silence)
        return found

    return TrainStep(mesh, layout, specs, begins, jax.jit(updates, donate_argnums=0))


def build_layout(config: RunConfig, mesh: Mesh, spec: models.ModelSpec) -> ParamLayout:
    """Build the layout of a document's weights in buckets on a mesh."""
    section = config.train.all_reduce
    sharded = config.train.weight_update == "sharded"
    return ParamLayout(
        {parameter.name: parameter.shape for parameter in spec.parameters},
        bucket_elements=int(section.bucket_mb * 2**18),
        shards=build_all_reduce(section, mesh).shards if sharded else 1,
    )


def _build_device_steps(
    config: RunConfig,
    mesh: Mesh,
    spec: models.ModelSpec,
    layout: ParamLayout,
    optimizer: Optimizer,
    reduce: AllReduce,
    scattered: AllReduce | None,
) -> Callable[[DeviceState, GlobalBatches, Array, StepInputs], tuple[DeviceState, StepResults]]:
    """Return the function that runs on each device, with its part of the batches."""
    train, section = config.train, config.model.batch_norm
    norm = assign_batch_norm_groups(BatchNorm(section.eps, section.momentum), batch_norm_group(config, mesh.size))
    apply = build_model(
        config.model,
        norm=norm,
        dtype=compute_dtype(train),
        stem=train.stem_compute,
        convolve=choose_convolution(mesh),
        parts=train.spatial_partitions,
    )
    passes = train.accumulation
    average = scattered.reduce_scatter if scattered else reduce
    gather = scattered.all_gather if scattered else lambda bucket: bucket

    def forward_backward(state: DeviceState, batch: GlobalBatches) -> tuple[Array, dict[str, Array], dict[str, Array]]:
        """Return loss, running statistics and gradients of this device's images."""
        key = random.fold_in(random.fold_in(random.key(config.run.seed), state.number), lax.axis_index(RANKS))
        parameters = layout.unpack([gather(bucket) for bucket in state.weights])

        def one_pass(
            statistics: dict[str, Array], part: GlobalBatches, key: Array
        ) -> tuple[Array, dict[str, Array], Any]:
            images = normalise(part.images, config.input)

            def loss_of(parameters: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
                logits, moved = apply(parameters, statistics, images, train=True, key=key)
                return smoothed_cross_entropy(logits, part.labels, train.label_smoothing) / passes, moved

            (loss, moved), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
            return loss, moved, gradients

        if passes == 1:
            return one_pass(state.statistics, batch, key)

        def add(carried: Any, given: Any) -> tuple[Any, None]:
            loss, statistics, gradients = carried
            now, moved, more = one_pass(statistics, given[0], random.fold_in(key, given[1]))
            return (loss + now, moved, jax.tree.map(jnp.add, gradients, more)), None

        parts = jax.tree.map(lambda whole: whole.reshape(passes, -1, *whole.shape[1:]), batch)
        nothing = jnp.float32(0), state.statistics, jax.tree.map(jnp.zeros_like, parameters)
        found: tuple[Array, dict[str, Array], dict[str, Array]]
        found, _ = lax.scan(add, nothing, (parts, jnp.arange(passes)))
        return found

    def update(state: DeviceState, batch: GlobalBatches, schedule: Array) -> tuple[DeviceState, StepResults]:
        loss, moved, gradients = forward_backward(state, batch)
        averages = tuple(average(bucket) for bucket in layout.pack(gradients))
        moves = statistics_change(state.statistics, moved) * running_statistics_weight(section)
        extra = reduce(jnp.concatenate([loss[None], moves]))
        share = build_param_shard(train.optimizer, layout, spec, scattered)
        hyper = HyperParams(*schedule[state.number])
        finite = all_finite([*averages, extra])
        weights, kept, finite = optimizer.step(share, state.weights, averages, state.opt_state, hyper, finite)
        statistics = apply_statistics_change(state.statistics, extra[1:], finite)
        norm = None if scattered else jnp.sqrt(sum(jnp.vdot(bucket, bucket) for bucket in averages))
        return DeviceState(weights, kept, statistics, state.number + 1), StepResults(extra[0], finite, norm)

    def updates(
        state: DeviceState, batches: GlobalBatches, schedule: Array, call: StepInputs
    ) -> tuple[DeviceState, StepResults]:
        word = lax.pmax(jnp.asarray(call.status)[0], RANKS)
        longest = len(batches.labels)

        def carry_out(number: Any, state: DeviceState) -> tuple[DeviceState, StepResults]:
            return update(state, jax.tree.map(lambda all_of: all_of[number], batches), schedule)

        def add(number: Array, carried: tuple[DeviceState, StepResults]) -> tuple[DeviceState, StepResults]:
            state, now = carry_out(number, carried[0])
            return state, jax.tree.map(lambda all_of, one: all_of.at[number].set(one), carried[1], now)

        with exact_products(train):
            if longest == 1:  # compilers do better without a loop, that of CPUs by far
                state, figures = carry_out(0, state)
                figures = jax.tree.map(lambda one: one[None], figures)
            else:
                _, shapes = jax.eval_shape(carry_out, 0, state)
                nothing = jax.tree.map(lambda one: jnp.zeros((longest, *one.shape), one.dtype), shapes)
                state, figures = lax.fori_loop(0, call.step_count, add, (state, nothing))
        return state, figures._replace(status=word)

    return updates


def all_finite(buckets: Sequence[Array]) -> Array:
    """Whether every element is finite, as a bool scalar."""
    return jnp.stack([jnp.isfinite(bucket).all() for bucket in buckets]).all()


def _check_step_options(config: RunConfig, mesh: Mesh) -> None:
    """Raise InputError for options of the document that this engine does not support."""
    train = config.train
    assert axis_size(mesh, GROUP) == batch_norm_group(config, mesh.size).ranks, "see mesh.mesh_of"
    if train.weight_gather != "fp32":
        raise InputError(
            "the JAX engine gathers weights in fp32",
            field="train.weight_gather",
            got=train.weight_gather,
            hint="Set train.weight_gather=fp32",
        )
