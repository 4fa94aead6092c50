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
from podscale.config.ranks import batch_norm_group
from podscale.data.step_positions import StepPositions
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
from podscale.jax.mesh import DEVICES, GROUP, RANKS, REPLICATED, axis_size, put_sharded
from podscale.jax.models import ApplyFunction, build_model, choose_convolution
from podscale.jax.optim import HyperParams, Optimizer, OptState, ReplicaAxes, build_optimizer, build_param_shard
from podscale.jax.precision import compute_dtype, exact_products
from podscale.training.param_layout import param_options
from podscale.training.schedules import batch_norm_momenta


def smoothed_cross_entropy(logits: Array, labels: Array, smoothing: float) -> Array:
    """Return the mean cross entropy in fp32 with label smoothing (Szegedy 2016, section 7).

    Args:
        logits: [n, classes], any float dtype.
        labels: integers [n].
        smoothing: mass of the target that is spread over all classes.
    """
    log_probs = nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    label_log_prob = jnp.take_along_axis(log_probs, labels[:, None], axis=1).mean()
    return -(1.0 - smoothing) * label_log_prob - smoothing * log_probs.mean()


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


class HostOptimizerState(NamedTuple):
    """Optimizer state by its names in a checkpoint, fp32, in host memory.

    Args:
        moments: arrays of each moment, by the weights' names.
        extra: arrays that are not per weight (see `optim.ExtraStateLayout`).
    """

    moments: Mapping[str, Mapping[str, Values]]
    scalars: Mapping[str, Values]
    extra: Mapping[str, Values]


STATUS_SPEC = PartitionSpec(RANKS)
STATUS_LENGTH = 4


@dataclass(frozen=True)
class TrainStep:
    mesh: Mesh
    layout: ParamLayout
    specs: Any
    """Sharding of the state: a `DeviceState` of partition specs."""
    optimizer: Optimizer
    run_steps: Callable[..., tuple[DeviceState, StepResults]]
    """Run steps: (state, batches, schedule, inputs) -> (state, results).

    The schedule is fp32 [steps, 3], replicated. The given state is donated. Without inputs: one step for each batch.
    """

    def init_state(
        self,
        parameters: NamedArrays,
        statistics: NamedArrays,
        number: int = 0,
        optimizer_state: HostOptimizerState | None = None,
    ) -> DeviceState:
        """Return the state after `number` steps, on the devices, from values that every process has.

        The default of `optimizer_state` is the optimizer's initial state.
        """
        state, extra_layout = optimizer_state or self.initial_optimizer_state(), self.optimizer.extra_layout
        moments = {slot: self.layout.pack_on_host(named) for slot, named in state.moments.items()}
        extra = extra_layout.pack(state.extra) if extra_layout else {}
        packed: Any = DeviceState(
            self.layout.pack_on_host(parameters),  # type: ignore[arg-type]
            OptState(moments, dict(state.scalars), extra),  # type: ignore[arg-type]
            dict(statistics),
            np.asarray(number, np.int32),  # type: ignore[arg-type]
        )

        def put(value: Array, spec: PartitionSpec) -> Array:
            array = put_sharded(np.asarray(value), NamedSharding(self.mesh, spec))
            return array.copy()  # the caller's arrays must outlive the state, whose memory is given away

        return jax.tree.map(put, packed, self.specs)  # type: ignore[no-any-return]

    def initial_optimizer_state(self) -> HostOptimizerState:
        """Return the optimizer state before the first step."""
        optimizer = self.optimizer
        moments = {
            slot: {name: np.broadcast_to(np.float32(value), shape) for name, shape in self.layout.shapes.items()}
            for slot, value in optimizer.initial_moments.items()
        }
        scalars = {name: np.array(value, np.float32) for name, value in optimizer.initial_scalars.items()}
        return HostOptimizerState(moments, scalars, optimizer.extra_layout.initial() if optimizer.extra_layout else {})

    def put_batches(self, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.integer[Any]]) -> GlobalBatches:
        """Put `images` [k, n, height, width, 3] and `labels` [k, n] of all devices, in this process, on the devices."""
        batches = GlobalBatches(images, labels.astype(np.int32))  # type: ignore[arg-type]
        shardings = jax.tree.map(partial(NamedSharding, self.mesh), BATCH_SPECS)
        return jax.device_put(batches, shardings)  # type: ignore[no-any-return]


def build_train_step(config: RunConfig, mesh: Mesh, classes: int, positions: StepPositions) -> TrainStep:
    """Build the step of a document for a run whose steps are at `positions`.

    Raises InputError for options that the mesh or this engine does not support.
    """
    _check_step_options(config, mesh)
    train, spec = config.train, models.model_spec(config.model, classes)
    param_options(train.optimizer, spec)  # raises for a skip list that matches nothing
    all_reduce, layout = build_all_reduce(train.all_reduce, mesh), build_layout(config, mesh, spec)
    replicas = ReplicaAxes() if train.weight_update == "sharded" else ReplicaAxes(DEVICES, mesh.size)
    optimizer = build_optimizer(train.optimizer, layout.shapes, positions.epoch_length, replicas)
    bucket_spec = PartitionSpec(all_reduce.axes) if train.weight_update == "sharded" else REPLICATED
    buckets = (bucket_spec,) * len(layout.lengths)
    moment_specs: dict[str, Any] = dict.fromkeys(optimizer.initial_moments, buckets)
    scalar_specs: dict[str, Any] = dict.fromkeys(optimizer.initial_scalars, REPLICATED)
    extra_specs: Any = dict(optimizer.extra_layout.specs) if optimizer.extra_layout else {}
    state_of_specs: Any = DeviceState
    specs = state_of_specs(
        weights=buckets,
        opt_state=OptState(moment_specs, scalar_specs, extra_specs),
        statistics={buffer.name: REPLICATED for buffer in spec.buffers},
        number=REPLICATED,
    )
    on_devices = jax.shard_map(
        _build_loop(config, _build_step(config, mesh, spec, layout, all_reduce, optimizer, positions)),
        mesh=mesh,
        in_specs=(specs, BATCH_SPECS, REPLICATED, StepInputs(REPLICATED, STATUS_SPEC)),
        out_specs=(specs, REPLICATED),
        check_vma=False,  # the check does not know that the result of all_gather is replicated
    )

    def run_steps(
        state: DeviceState, batches: GlobalBatches, schedule: Array, inputs: StepInputs | None = None
    ) -> tuple[DeviceState, StepResults]:
        no_status = jnp.zeros((axis_size(mesh, RANKS), STATUS_LENGTH), jnp.int32)
        result: tuple[DeviceState, StepResults] = on_devices(
            state, batches, schedule, inputs or StepInputs(jnp.int32(len(batches.labels)), no_status)
        )
        return result

    return TrainStep(mesh, layout, specs, optimizer, jax.jit(run_steps, donate_argnums=0))


def build_layout(config: RunConfig, mesh: Mesh, spec: models.ModelSpec) -> ParamLayout:
    """Build the layout of a document's weights in buckets on a mesh."""
    train = config.train
    return ParamLayout(
        {parameter.name: parameter.shape for parameter in spec.parameters},
        bucket_elements=int(train.all_reduce.bucket_mb * 2**18),
        shards=build_all_reduce(train.all_reduce, mesh).shards if train.weight_update == "sharded" else 1,
    )


Gradients = tuple[Array, dict[str, Array], dict[str, Array]]
"""Loss, new running statistics and gradients by name, of a device's images."""
StepFunction = Callable[[DeviceState, GlobalBatches, Array], tuple[DeviceState, StepResults]]
"""Runs one step on each device: (state, the device's part of the batch, schedule) -> (state, results)."""


def _build_forward_backward(
    config: RunConfig, mesh: Mesh, layout: ParamLayout, gather: Callable[[Array], Array], positions: StepPositions
) -> Callable[[DeviceState, GlobalBatches], Gradients]:
    """Return a device's function for loss, statistics and gradients of its images; `gather` unshards a bucket."""
    train, section = config.train, config.model.batch_norm
    passes = train.accumulation
    momenta, dtype = batch_norm_momenta(config, positions), compute_dtype(train)

    def apply_at(number: Array) -> ApplyFunction:
        """Return the network with batch norm's momentum of step `number`."""
        momentum: Any = momenta[0][1]
        for first, later in momenta[1:]:
            momentum = jnp.where(number >= first, later, momentum)
        return build_model(
            config.model,
            norm=assign_batch_norm_groups(BatchNorm(section.eps, momentum), batch_norm_group(config, mesh.size)),
            dtype=dtype,
            stem=train.stem_compute,
            convolve=choose_convolution(mesh),
            parts=train.spatial_partitions,
        )

    def one_pass(
        apply: ApplyFunction,
        parameters: dict[str, Array],
        statistics: dict[str, Array],
        batch: GlobalBatches,
        key: Array,
    ) -> Gradients:
        images = normalise(batch.images, config.input, train.spatial_partitions)

        def loss_of(parameters: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            logits, new_statistics = apply(parameters, statistics, images, train=True, key=key)
            return smoothed_cross_entropy(logits, batch.labels, train.label_smoothing) / passes, new_statistics

        (loss, new_statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        return loss, new_statistics, gradients

    def forward_backward(state: DeviceState, batch: GlobalBatches) -> Gradients:
        key = random.fold_in(random.fold_in(random.key(config.run.seed), state.number), lax.axis_index(RANKS))
        parameters = layout.unpack([gather(bucket) for bucket in state.weights])
        apply = apply_at(state.number)
        if passes == 1:
            return one_pass(apply, parameters, state.statistics, batch, key)

        def add_pass(sums: Gradients, scanned: tuple[GlobalBatches, Array]) -> tuple[Gradients, None]:
            (loss, statistics, gradients), (part, index) = sums, scanned
            more = one_pass(apply, parameters, statistics, part, random.fold_in(key, index))
            return (loss + more[0], more[1], jax.tree.map(jnp.add, gradients, more[2])), None

        parts = jax.tree.map(lambda array: array.reshape(passes, -1, *array.shape[1:]), batch)
        zeros = jnp.float32(0), state.statistics, jax.tree.map(jnp.zeros_like, parameters)
        sums: Gradients
        sums, _ = lax.scan(add_pass, zeros, (parts, jnp.arange(passes)))
        return sums

    return forward_backward


def _build_step(
    config: RunConfig,
    mesh: Mesh,
    spec: models.ModelSpec,
    layout: ParamLayout,
    all_reduce: AllReduce,
    optimizer: Optimizer,
    positions: StepPositions,
) -> StepFunction:
    train = config.train
    sharded_all_reduce = all_reduce if train.weight_update == "sharded" else None
    average = sharded_all_reduce.reduce_scatter if sharded_all_reduce else all_reduce
    gather = sharded_all_reduce.all_gather if sharded_all_reduce else lambda bucket: bucket
    forward_backward = _build_forward_backward(config, mesh, layout, gather, positions)

    def step(state: DeviceState, batch: GlobalBatches, schedule: Array) -> tuple[DeviceState, StepResults]:
        loss, new_statistics, gradients = forward_backward(state, batch)
        averages = tuple(average(bucket) for bucket in layout.pack(gradients))
        change = statistics_change(state.statistics, new_statistics) * running_statistics_weight(
            config.model.batch_norm
        )
        extra = all_reduce(jnp.concatenate([loss[None], change]))
        shard = build_param_shard(train.optimizer, layout, spec, sharded_all_reduce)
        learning_rate, momentum, weight_decay = schedule[state.number]
        hyper = HyperParams(learning_rate, momentum, weight_decay, extra[0], state.number)
        finite = all_finite([*averages, extra])
        weights, opt_state, finite = optimizer.step(shard, state.weights, averages, state.opt_state, hyper, finite)
        statistics = apply_statistics_change(state.statistics, extra[1:], finite)
        norm = None if sharded_all_reduce else jnp.sqrt(sum(jnp.vdot(bucket, bucket) for bucket in averages))
        return DeviceState(weights, opt_state, statistics, state.number + 1), StepResults(extra[0], finite, norm)

    return step


def _build_loop(
    config: RunConfig, step: StepFunction
) -> Callable[[DeviceState, GlobalBatches, Array, StepInputs], tuple[DeviceState, StepResults]]:
    """Return the function that runs several steps on each device and reduces the ranks' statuses."""

    def run_steps(
        state: DeviceState, batches: GlobalBatches, schedule: Array, inputs: StepInputs
    ) -> tuple[DeviceState, StepResults]:
        status = lax.pmax(jnp.asarray(inputs.status)[0], RANKS)
        longest = len(batches.labels)

        def run_step(number: Any, state: DeviceState) -> tuple[DeviceState, StepResults]:
            return step(state, jax.tree.map(lambda stack: stack[number], batches), schedule)

        def add_step(number: Array, carry: tuple[DeviceState, StepResults]) -> tuple[DeviceState, StepResults]:
            state, result = run_step(number, carry[0])
            return state, jax.tree.map(lambda stack, value: stack.at[number].set(value), carry[1], result)

        with exact_products(config.train):
            if longest == 1:  # programs without a loop are faster, those for CPUs by far
                state, result = run_step(0, state)
                results = jax.tree.map(lambda value: value[None], result)
            else:
                _, shapes = jax.eval_shape(run_step, 0, state)
                zeros = jax.tree.map(lambda shape: jnp.zeros((longest, *shape.shape), shape.dtype), shapes)
                state, results = lax.fori_loop(0, inputs.step_count, add_step, (state, zeros))
        return state, results._replace(status=status)

    return run_steps


def all_finite(buckets: Sequence[Array]) -> Array:
    """Return a bool scalar, True if all elements of `buckets` are finite."""
    return jnp.stack([jnp.isfinite(bucket).all() for bucket in buckets]).all()


def _check_step_options(config: RunConfig, mesh: Mesh) -> None:
    """Raise InputError for options of the document that this engine does not support."""
    train = config.train
    assert axis_size(mesh, GROUP) % batch_norm_group(config, mesh.size).ranks == 0, "see mesh.mesh_for_config"
    if train.weight_gather != "fp32":
        raise InputError(
            "the JAX engine gathers weights in fp32",
            field="train.weight_gather",
            got=train.weight_gather,
            hint="Set train.weight_gather=fp32",
        )
