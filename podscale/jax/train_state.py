"""State of a training run: capture to and restore from engine-neutral checkpoints, loading of exported weights."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from podscale import models
from podscale.config import RunConfig
from podscale.distributed.waits import CHECKPOINT, waiting_for
from podscale.errors import InputError, fields_of
from podscale.jax.flat_buffers import Buckets
from podscale.jax.mesh import REPLICATED
from podscale.jax.models import initialise
from podscale.jax.optim import LookaheadOptimizer, OptState
from podscale.jax.train_step import DeviceState, HostOptimizerState, TrainStep
from podscale.jax.world import World
from podscale.runs.checkpoint import CheckpointStore, Snapshot
from podscale.runs.model_files import read_weights
from podscale.training.initial_weights import InitialWeights
from podscale.training.run_progress import RunProgress

Values = npt.NDArray[Any]


@dataclass
class TrainState:
    """State that a checkpoint holds, equal on all processes."""

    config: RunConfig
    classes: int
    step: TrainStep
    world: World
    progress: RunProgress = field(default_factory=RunProgress)
    _device_state: DeviceState | None = None

    @property
    def device_state(self) -> DeviceState:
        """State on the devices. The caller of a step replaces it by the step's result."""
        assert self._device_state is not None, "load_from_rank0 comes first"
        return self._device_state

    @device_state.setter
    def device_state(self, state: DeviceState) -> None:
        self._device_state = state

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state on a device."""
        opt_state = self.device_state.opt_state
        arrays: list[Array] = jax.tree.leaves((opt_state.moments, opt_state.extra))
        return sum(array.addressable_shards[0].data.nbytes for array in arrays)

    def check_arrays(self, snapshot: Snapshot) -> None:
        """Raise InputError if a checkpoint does not hold the arrays of this model and its optimizer."""
        spec = models.model_spec(self.config.model, self.classes)
        expected = {f"model/{name}" for name in spec.array_shapes}
        different = sorted((expected | self._initial_optimizer_state().keys()) ^ snapshot.arrays.keys())
        if different:
            raise InputError(
                f"the checkpoint of step {snapshot.step} does not hold the arrays of this model: another version of "
                "Podscale wrote it",
                field=different[0],
                hint="Start a new run.",
            )

    def initial_snapshot(self, initial_weights: InitialWeights) -> Snapshot:
        """Return the state of a new run that starts from the weights and statistics of another one."""
        parameters, statistics = initialise(self.config.model, self.classes, self.config.run.seed)
        loaded = {**parameters, **statistics, **initial_weights.arrays}  # a new classifier keeps its own values
        arrays = {f"model/{name}": np.asarray(values) for name, values in loaded.items()}
        return Snapshot(
            0,
            arrays | self._initial_optimizer_state(),
            {"progress": asdict(RunProgress(origin=initial_weights.provenance))},
        )

    def load_from_rank0(self, snapshot: Snapshot | None) -> None:
        """Load `snapshot`, which only process 0 has, on all devices; without one, the state of a new run."""
        parameters, statistics = initialise(self.config.model, self.classes, self.config.run.seed)
        meta = self.world.broadcast(None if snapshot is None else snapshot.meta)
        if meta is None:
            self.device_state = self.step.init_state(parameters, statistics)
            return
        arrays = {f"model/{name}": value for name, value in {**parameters, **statistics}.items()}
        arrays |= self._initial_optimizer_state()
        if snapshot is not None:
            arrays = {name: np.asarray(snapshot.arrays[name], np.float32) for name in arrays}
        if self.world.size > 1:
            arrays = multihost_utils.broadcast_one_to_all(arrays, is_source=self.world.is_rank0)
        for name, value in meta["progress"].items():
            setattr(self.progress, name, value)
        optimizer, initial = self.step.optimizer, self.step.initial_optimizer_state()
        optimizer_state = HostOptimizerState(
            {slot: {name: arrays[f"optimizer/{slot}/{name}"] for name in parameters} for slot in initial.moments},
            {name: arrays[f"optimizer/{name}"] for name in optimizer.initial_scalars},
            {name: arrays[f"optimizer/{name}"] for name in initial.extra},
        )
        parameters = {name: arrays[f"model/{name}"] for name in parameters}
        statistics = {name: arrays[f"model/{name}"] for name in statistics}
        self.device_state = self.step.init_state(parameters, statistics, self.progress.step, optimizer_state)

    @waiting_for(CHECKPOINT)
    def model_arrays(self) -> dict[str, Values]:
        """Return the fp32 weights to evaluate and statistics by name, on process 0. All processes call it."""
        return self._model_arrays_of(self.unshard_evaluation_weights())

    @waiting_for(CHECKPOINT)
    def capture(self) -> Snapshot | None:
        """Return a copy of the state in process 0's host memory, None elsewhere. All processes call it."""
        weights, opt_state = self._unshard(self.device_state.weights), self.device_state.opt_state
        extra = dict(zip(opt_state.extra, self._unshard(tuple(opt_state.extra.values())), strict=True))
        moments = {slot: self._unshard(buckets) for slot, buckets in opt_state.moments.items()}
        if not self.world.is_rank0:
            return None
        arrays = {f"model/{name}": value for name, value in self._model_arrays_of(weights).items()}
        for slot, buckets in moments.items():
            named = self.step.layout.unpack([np.array(bucket) for bucket in buckets])
            arrays |= {f"optimizer/{slot}/{name}": value for name, value in named.items()}
        arrays |= {f"optimizer/{name}": np.array(scalar) for name, scalar in opt_state.scalars.items()}
        if layout := self.step.optimizer.extra_layout:
            unpacked = layout.unpack({name: np.asarray(array) for name, array in extra.items()})
            arrays |= {f"optimizer/{name}": array for name, array in unpacked.items()}
        precision = {"loss_scale": self.config.train.loss_scale, "finite_in_a_row": 0}  # for the other engine
        meta = {"progress": asdict(self.progress), "precision": precision, "ranks": len(self.world.devices)}
        return Snapshot(self.progress.step, arrays, meta)

    @waiting_for(CHECKPOINT)
    def unshard_evaluation_weights(self) -> Buckets:
        """Return the buckets of the weights to evaluate, unsharded on every device. All processes call it."""
        state = self.device_state
        if isinstance(self.step.optimizer, LookaheadOptimizer):
            return self._evaluation_weights(state.weights, state.opt_state)
        return self._unshard(state.weights)

    def _initial_optimizer_state(self) -> dict[str, Values]:
        """Return the optimizer state before the first step, by its names in a checkpoint."""
        moments, scalars, extra = self.step.initial_optimizer_state()
        arrays = {f"optimizer/{slot}/{name}": array for slot, named in moments.items() for name, array in named.items()}
        return arrays | {f"optimizer/{name}": array for name, array in {**scalars, **extra}.items()}

    def _model_arrays_of(self, weights: Buckets) -> dict[str, Values]:
        if not self.world.is_rank0:
            return {}
        statistics = {name: np.array(array) for name, array in self.device_state.statistics.items()}
        return self.step.layout.unpack([np.array(bucket) for bucket in weights]) | statistics

    def _unshard(self, buckets: Buckets) -> Buckets:
        """Gather scattered buckets on every device."""
        return buckets if all(bucket.is_fully_replicated for bucket in buckets) else self._gather(buckets)

    @cached_property
    def _evaluation_weights(self) -> Callable[[Buckets, OptState], Buckets]:
        optimizer = self.step.optimizer
        assert isinstance(optimizer, LookaheadOptimizer)
        return jax.jit(optimizer.evaluation_weights, out_shardings=NamedSharding(self.step.mesh, REPLICATED))

    @cached_property
    def _gather(self) -> Callable[[Buckets], Buckets]:
        return jax.jit(lambda buckets: buckets, out_shardings=NamedSharding(self.step.mesh, REPLICATED))


@waiting_for(CHECKPOINT)
def restore_or_start(
    checkpoint_store: CheckpointStore,
    resume: str,
    state: TrainState,
    initial_weights: Callable[[], InitialWeights | None] = lambda: None,
) -> bool:
    """Restore the newest complete checkpoint, which process 0 reads and verifies. Returns False if there is none.

    Without one the run starts from `initial_weights`, if that returns any. Raises InputError on every process if
    process 0's checkpoints or the initial weights conflict with the run.
    """
    snapshot: Snapshot | None = None
    restored, refusal = False, None
    if state.world.is_rank0:
        try:
            snapshot = checkpoint_store.restore(resume)
            if snapshot is not None:
                restored = True
                state.check_arrays(snapshot)
            elif (weights := initial_weights()) is not None:
                snapshot = state.initial_snapshot(weights)
        except InputError as error:
            refusal = fields_of(error)
    restored, refusal = state.world.broadcast([restored, refusal])
    if refusal:
        raise InputError(**refusal)
    state.load_from_rank0(snapshot)
    return bool(restored)


def load_weights_file(spec: models.ModelSpec, path: Path) -> tuple[dict[str, Values], dict[str, Values]]:
    """Return fp32 parameters and statistics of an exported model. Raises InputError if missing or of another model."""
    arrays = read_weights(path, spec.array_shapes)
    return (
        {parameter.name: arrays[parameter.name] for parameter in spec.parameters},
        {buffer.name: arrays[buffer.name] for buffer in spec.buffers},
    )
