"""Updates: forward, backward, average over the devices, masked parameter update; several in one program.

A program carries out as many updates as it is told, up to the batches that it is given, by a loop on the device, so
that the host has time for dispatch; one program serves every number. The schedule lies on the device as a table, and so
does the number of the update that indexes it. State is donated: the new one takes the memory of the old.

Where the update is sharded (Kumar 2019; Xu 2020), each device keeps its shard of weights and momentum, and a step
begins with gathering the weights. That is the gathering at the end of the step before, but nothing is kept twice, and
the compiler may compute the first layers while weights of later ones are on their way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax, random
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podscale import models
from podscale.config import RunConfig
from podscale.config.spans import batch_norm_span
from podscale.decay import treatments
from podscale.errors import InputError
from podscale.jax.allreduce import AllReduce, build_all_reduce
from podscale.jax.batchnorm import BatchNorm, span_groups
from podscale.jax.gradients import Buckets, Layout, Values
from podscale.jax.loss import smoothed_cross_entropy
from podscale.jax.mesh import GROUP, RANKS, REPLICATED, SPATIAL, size_of
from podscale.jax.models import build_model, convolution_on
from podscale.jax.normalise import normalise
from podscale.jax.optim import Hyper, Kept, Rule, build_optimizer, build_share, scalars, slots
from podscale.jax.placing import spread
from podscale.jax.precision import compute_dtype, exact_products
from podscale.jax.statistics import change, changed, running_share

Named = Mapping[str, Any]
"""Arrays of the host or of a device by the catalogue's names."""


class State(NamedTuple):
    """What an update changes, on the devices.

    weights: fp32 buckets (see `gradients.Layout`), equal on all devices, or scattered where the update is sharded; the
    moments of what the update rule has kept lie as they do. statistics: batch norm's running ones by the catalogue's
    names. number: of updates so far, masked ones included, int32.
    """

    weights: Buckets
    kept: Kept
    statistics: dict[str, Array]
    number: Array


class Figures(NamedTuple):
    """What is known of k updates, equal on all devices.

    loss: fp32 [k], the mean over the global batch. finite: bool [k], whether carried out. grad_norm: fp32 [k], of the
    averaged gradient; None where the update is sharded and no device has all of it. word: see `Call`, under MAX.
    """

    loss: Array
    finite: Array
    grad_norm: Array | None
    word: Array | None = None


class Call(NamedTuple):
    """What the host says with a call.

    updates: how many to carry out, int32. word: of each rank, int32 [ranks, 4]; all learn it under MAX (see `control`).
    """

    updates: Any
    word: Any


class Batches(NamedTuple):
    """Global batches of as many updates: images uint8 [k, n, height, width, 3], labels int32 [k, n].

    Each rank of the mesh takes an equal part of the n images, in order.
    """

    images: Array
    labels: Array


SHARDED_BATCHES: Any = Batches(PartitionSpec(None, RANKS, *SPATIAL), PartitionSpec(None, RANKS))  # type: ignore[arg-type]
"""How they lie on the mesh: devices that share images each have a tile of them, and all of their labels."""
SHARDED_WORDS = PartitionSpec(RANKS)
WORD = 4
"""Numbers of a word."""


@dataclass(frozen=True)
class Step:
    """The updates of a document on a mesh."""

    mesh: Mesh
    layout: Layout
    specs: Any
    """How the state lies on the mesh: a State with partition specs in the place of arrays."""
    slots: Mapping[str, float]
    """What the update rule keeps of every weight, and the value that it begins with."""
    updates: Callable[..., tuple[State, Figures]]
    """(state, batches, schedule, call): carries out updates; schedule: fp32 [updates, 3], replicated. The state given
    is used up. Without a call: one update for each batch, and nothing to say."""

    def begin(
        self,
        parameters: Named,
        statistics: Named,
        number: int = 0,
        moments: Mapping[str, Named] | None = None,
        scalars: Named | None = None,
    ) -> State:
        """The state after `number` updates, on the devices, of values that every process has.

        moments: arrays by the weights' names for every slot of the optimizer; scalars: its others. Default: new ones.
        """
        fresh_moments, fresh_scalars = self.fresh()
        laid = {slot: self.layout.lay_out(named) for slot, named in (moments or fresh_moments).items()}
        packed: Any = State(
            self.layout.lay_out(parameters),  # type: ignore[arg-type]
            Kept(laid, dict(scalars or fresh_scalars)),  # type: ignore[arg-type]
            dict(statistics),
            np.asarray(number, np.int32),  # type: ignore[arg-type]
        )
        return self._placed(packed)

    def fresh(self) -> tuple[dict[str, dict[str, Values]], dict[str, Values]]:
        """What the update rule has kept before the first update: moments by slot and name, and scalars."""
        shapes, names = self.layout.shapes.items(), self.specs.kept.scalars
        moments = {
            slot: {name: np.broadcast_to(np.float32(value), shape) for name, shape in shapes}
            for slot, value in self.slots.items()
        }
        return moments, {name: np.zeros((), np.float32) for name in names}

    def batches(self, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.integer[Any]]) -> Batches:
        """Batches of the host on the devices."""
        given = Batches(images, labels.astype(np.int32))  # type: ignore[arg-type]
        lies = jax.tree.map(partial(NamedSharding, self.mesh), SHARDED_BATCHES)
        return jax.device_put(given, lies)  # type: ignore[no-any-return]

    def named(self, buckets: Buckets) -> dict[str, Array]:
        """Weights or moments of a state by the catalogue's names, whole, whatever the sharding."""
        return self.layout.unpack(buckets)

    def _placed(self, state: State) -> State:
        def place(value: Array, spec: PartitionSpec) -> Array:
            placed = spread(np.asarray(value), NamedSharding(self.mesh, spec))
            return placed.copy()  # the caller's arrays must outlive the state, whose memory is given away

        return jax.tree.map(place, state, self.specs)  # type: ignore[no-any-return]


def build_step(config: RunConfig, mesh: Mesh, classes: int) -> Step:
    """The step of a document. Raises InputError for what does not fit the mesh, or what this engine does not have."""
    _check(config, mesh)
    train, spec = config.train, models.spec(config.model, classes)
    treatments(train.optimizer, spec)  # raises for a skip list that matches nothing
    rule, reduce = build_optimizer(train.optimizer), build_all_reduce(train.all_reduce, mesh)
    scattered = reduce if train.weight_update == "sharded" else None
    layout = build_layout(config, mesh, spec)
    begins = slots(train.optimizer)
    buckets = (PartitionSpec(scattered.axes) if scattered else REPLICATED,) * len(layout.lengths)
    moments: dict[str, Any] = dict.fromkeys(begins, buckets)
    others: dict[str, Any] = dict.fromkeys(scalars(train.optimizer), REPLICATED)
    of_specs: Any = State
    specs = of_specs(
        weights=buckets,
        kept=Kept(moments, others),
        statistics={buffer.name: REPLICATED for buffer in spec.buffers},
        number=REPLICATED,
    )
    called = jax.shard_map(
        _build_updates(config, mesh, spec, layout, rule, reduce, scattered),
        mesh=mesh,
        in_specs=(specs, SHARDED_BATCHES, REPLICATED, Call(REPLICATED, SHARDED_WORDS)),
        out_specs=(specs, REPLICATED),
        check_vma=False,  # what all_gather returns is replicated, which the check does not know
    )

    def updates(state: State, batches: Batches, schedule: Array, call: Call | None = None) -> tuple[State, Figures]:
        silence = Call(jnp.int32(len(batches.labels)), jnp.zeros((size_of(mesh, RANKS), WORD), jnp.int32))
        found: tuple[State, Figures] = called(state, batches, schedule, call or silence)
        return found

    return Step(mesh, layout, specs, begins, jax.jit(updates, donate_argnums=0))


def build_layout(config: RunConfig, mesh: Mesh, spec: models.ModelSpec) -> Layout:
    """How the weights of a document lie in buckets on a mesh."""
    section = config.train.all_reduce
    sharded = config.train.weight_update == "sharded"
    return Layout(
        {parameter.name: parameter.shape for parameter in spec.parameters},
        bucket_elements=int(section.bucket_mb * 2**18),
        shards=build_all_reduce(section, mesh).shards if sharded else 1,
    )


def _build_updates(
    config: RunConfig,
    mesh: Mesh,
    spec: models.ModelSpec,
    layout: Layout,
    rule: Rule,
    reduce: AllReduce,
    scattered: AllReduce | None,
) -> Callable[[State, Batches, Array, Call], tuple[State, Figures]]:
    """What each device does with its part of the batches."""
    train, section = config.train, config.model.batch_norm
    norm = span_groups(BatchNorm(section.eps, section.momentum), batch_norm_span(config, mesh.size))
    apply = build_model(
        config.model,
        norm=norm,
        dtype=compute_dtype(train),
        stem=train.stem_compute,
        convolve=convolution_on(mesh),
        parts=train.spatial_partitions,
    )
    passes = train.accumulation
    average = scattered.reduce_scatter if scattered else reduce
    gather = scattered.all_gather if scattered else lambda bucket: bucket

    def forward_backward(state: State, batch: Batches) -> tuple[Array, dict[str, Array], dict[str, Array]]:
        """Loss, running statistics and gradients of this device's images."""
        key = random.fold_in(random.fold_in(random.key(config.run.seed), state.number), lax.axis_index(RANKS))
        parameters = layout.unpack([gather(bucket) for bucket in state.weights])

        def one_pass(statistics: dict[str, Array], part: Batches, key: Array) -> tuple[Array, dict[str, Array], Any]:
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

    def update(state: State, batch: Batches, schedule: Array) -> tuple[State, Figures]:
        loss, moved, gradients = forward_backward(state, batch)
        averages = tuple(average(bucket) for bucket in layout.pack(gradients))
        moves = change(state.statistics, moved) * running_share(section)
        extra = reduce(jnp.concatenate([loss[None], moves]))
        share = build_share(train.optimizer, layout, spec, scattered)
        hyper = Hyper(*schedule[state.number])
        finite = all_finite([*averages, extra])
        weights, kept, finite = rule(share, state.weights, averages, state.kept, hyper, finite)
        statistics = changed(state.statistics, extra[1:], finite)
        norm = None if scattered else jnp.sqrt(sum(jnp.vdot(bucket, bucket) for bucket in averages))
        return State(weights, kept, statistics, state.number + 1), Figures(extra[0], finite, norm)

    def updates(state: State, batches: Batches, schedule: Array, call: Call) -> tuple[State, Figures]:
        word = lax.pmax(jnp.asarray(call.word)[0], RANKS)
        longest = len(batches.labels)

        def carry_out(number: Any, state: State) -> tuple[State, Figures]:
            return update(state, jax.tree.map(lambda all_of: all_of[number], batches), schedule)

        def add(number: Array, carried: tuple[State, Figures]) -> tuple[State, Figures]:
            state, now = carry_out(number, carried[0])
            return state, jax.tree.map(lambda all_of, one: all_of.at[number].set(one), carried[1], now)

        with exact_products(train):
            if longest == 1:  # compilers do better without a loop, that of CPUs by far
                state, figures = carry_out(0, state)
                figures = jax.tree.map(lambda one: one[None], figures)
            else:
                _, shapes = jax.eval_shape(carry_out, 0, state)
                nothing = jax.tree.map(lambda one: jnp.zeros((longest, *one.shape), one.dtype), shapes)
                state, figures = lax.fori_loop(0, call.updates, add, (state, nothing))
        return state, figures._replace(word=word)

    return updates


def all_finite(buckets: Sequence[Array]) -> Array:
    """Whether every element is finite, as a bool scalar."""
    return jnp.stack([jnp.isfinite(bucket).all() for bucket in buckets]).all()


def _check(config: RunConfig, mesh: Mesh) -> None:
    """Raises InputError for options of the document that this engine does not have."""
    train = config.train
    assert size_of(mesh, GROUP) == batch_norm_span(config, mesh.size).ranks, "see mesh.mesh_of"
    if train.weight_gather != "fp32":
        raise InputError(
            "the JAX engine gathers weights in fp32",
            field="train.weight_gather",
            got=train.weight_gather,
            hint="Set train.weight_gather=fp32",
        )
