"""State of a training run: capture to and restore from engine-neutral checkpoints, EMA, loading of exported weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch import distributed as dist

from podscale.config.optimizer import EmaSection
from podscale.distributed.waits import CHECKPOINT, waiting_for
from podscale.errors import InputError
from podscale.pytorch.flat_buffers import FlatWeights
from podscale.pytorch.models.state import model_arrays, running_statistics, untrained_arrays
from podscale.pytorch.optim import ExtraStateOptimizer, LookaheadOptimizer, Optimizer
from podscale.pytorch.precision import Precision
from podscale.pytorch.world import World
from podscale.runs.checkpoint import CheckpointStore, Snapshot
from podscale.runs.model_files import read_weights
from podscale.training.initial_weights import InitialWeights
from podscale.training.run_progress import RunProgress


@dataclass(frozen=True)
class TrainState:
    """State that a checkpoint holds, equal on all ranks."""

    model: nn.Module
    weights: FlatWeights
    optimizer: Optimizer
    precision: Precision
    progress: RunProgress
    ema: "Ema | None" = None

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state, separate masters and EMA on this rank, without the model's weights."""
        tensors = [*self.optimizer.moments.values()]
        if self.weights.masters is not self.weights.model_weights:
            tensors.append(self.weights.masters)
        if self.ema is not None:
            tensors.append(self.ema.values)
        extra = self.optimizer.extra_state_bytes if isinstance(self.optimizer, ExtraStateOptimizer) else 0
        return extra + sum(tensor.nbytes for tensor in tensors)

    def tensors(self) -> dict[str, Tensor]:
        """Return all arrays by checkpoint name, in fp32, the same for any sharding and precision. All ranks call it."""
        return self._named_tensors(self._flat_tensors(), self._extra_state())

    @contextmanager
    def with_weights(self, *, averaged: bool) -> Iterator[nn.Module]:
        """Yield the model with the weights to evaluate, or with their averages. All ranks enter it together.

        Restores the training weights afterwards, to the bit.
        """
        flat, values = self._evaluation_tensors(averaged=averaged)
        buffers = running_statistics(self.model)
        saved = {name: buffers[name].clone() for name in values}
        with self.weights.swapped(flat) if flat is not None else nullcontext(), torch.no_grad():
            try:
                for name, value in values.items():
                    buffers[name].copy_(value)
                yield self.model
            finally:
                for name, value in saved.items():
                    buffers[name].copy_(value)

    @waiting_for(CHECKPOINT)
    def model_arrays(self, *, averaged: bool = False) -> dict[str, npt.NDArray[Any]]:
        """Return the fp32 weights and buffers to evaluate by their names in the model. All ranks call it."""
        flat, values = self._evaluation_tensors(averaged=averaged)
        weights = self.weights.named_views(self.weights.unshard_masters() if flat is None else flat)
        tensors = weights | untrained_arrays(self.model) | values
        return {name: as_array(tensor) for name, tensor in tensors.items()}

    @waiting_for(CHECKPOINT)
    def _evaluation_tensors(self, *, averaged: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the unsharded fp32 weights to evaluate and buffers by name; None and {} for the model's own."""
        if averaged:
            assert self.ema is not None
            return self.weights.unshard(self.ema.values), self.ema.buffers
        if isinstance(self.optimizer, LookaheadOptimizer):
            return self.weights.unshard(self.optimizer.evaluation_weights()), {}
        return None, {}

    @waiting_for(CHECKPOINT)
    def capture(self, world: World) -> Snapshot | None:
        """Return a copy of the state in rank 0's host memory, None on other ranks. All ranks call it."""
        tensors = self.tensors()
        if not world.is_rank0:
            return None
        arrays = {name: as_array(tensor) for name, tensor in tensors.items()}
        return Snapshot(self.progress.step, arrays, {**self._meta(), "ranks": world.size})

    @waiting_for(CHECKPOINT)
    def load_from_rank0(
        self, snapshot: Snapshot | None, world: World, initial_weights: InitialWeights | None = None
    ) -> None:
        """Load `snapshot` or else `initial_weights` on rank 0 and broadcast the state to all ranks.

        Raises InputError on every rank if the snapshot does not hold the arrays of this model and its optimizer.
        """
        flat, extra = self._flat_tensors(), self._extra_state()
        named = self._named_tensors(flat, extra)
        saved = world.broadcast(None if snapshot is None else (snapshot.step, set(snapshot.arrays)))
        if saved is not None:
            _check_arrays(*saved, expected=set(named))
        if snapshot is not None:
            self._load_snapshot(snapshot, named)
        elif initial_weights is not None:
            self._load_initial_weights(initial_weights, named)
        self._load_meta(world.broadcast(self._meta() if world.is_rank0 else None))
        tensors = [
            *flat.values(),
            *extra.values(),
            *untrained_arrays(self.model).values(),
            *self.optimizer.scalars.values(),
        ]
        tensors += self.ema.buffers.values() if self.ema is not None else ()
        message = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(message, src=0)
        for tensor, part in zip(tensors, message.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))
        self.weights.load_masters(flat.pop("model"))
        for name, values in self.optimizer.moments.items():
            values.copy_(self.weights.local(flat[f"optimizer/{name}"]))
        if isinstance(self.optimizer, ExtraStateOptimizer):
            self.optimizer.load_extra_state({name.removeprefix("optimizer/"): array for name, array in extra.items()})
        if self.ema is not None:
            self.ema.values.copy_(self.weights.local(flat["ema"]))

    def _flat_tensors(self) -> dict[str, Tensor]:
        """Return masters, moments and averages as unsharded flat buffers."""
        moments = {f"optimizer/{name}": self.weights.unshard(v) for name, v in self.optimizer.moments.items()}
        ema = {} if self.ema is None else {"ema": self.weights.unshard(self.ema.values)}
        return {"model": self.weights.unshard_masters(), **moments, **ema}

    def _extra_state(self) -> dict[str, Tensor]:
        """Return the optimizer's unsharded state that is not per weight."""
        arrays = self.optimizer.extra_state_arrays() if isinstance(self.optimizer, ExtraStateOptimizer) else {}
        return {f"optimizer/{name}": array for name, array in arrays.items()}

    def _named_tensors(self, flat: dict[str, Tensor], extra: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return every array by its checkpoint name: views of `flat`, buffers, the extra state and scalars."""
        named = {
            f"{kind}/{name}": view
            for kind, values in flat.items()
            for name, view in self.weights.named_views(values).items()
        }
        named |= {f"model/{name}": array for name, array in untrained_arrays(self.model).items()}
        if self.ema is not None:
            named |= {f"ema/{name}": buffer for name, buffer in self.ema.buffers.items()}
        return named | extra | {f"optimizer/{name}": scalar for name, scalar in self.optimizer.scalars.items()}

    def _meta(self) -> dict[str, Any]:
        return {"progress": asdict(self.progress), "precision": self.precision.state_dict()}

    def _load_snapshot(self, snapshot: Snapshot, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(np.array(snapshot.arrays[name])))
        self._load_meta(snapshot.meta)

    def _load_initial_weights(self, initial_weights: InitialWeights, tensors: dict[str, Tensor]) -> None:
        """Load the weights and running statistics of another run. All other state stays as in a new run."""
        for name, values in initial_weights.arrays.items():
            for kind in ("model", "ema"):
                if f"{kind}/{name}" in tensors:
                    tensors[f"{kind}/{name}"].copy_(torch.from_numpy(np.array(values)))
        self.progress.origin = initial_weights.provenance

    def _load_meta(self, meta: dict[str, Any]) -> None:
        for name, value in meta["progress"].items():
            setattr(self.progress, name, value)
        self.precision.load_state_dict(meta["precision"])


def _check_arrays(step: int, saved: set[str], *, expected: set[str]) -> None:
    """Raise InputError if the checkpoint of a step has other arrays, by name, than expected."""
    if different := sorted(saved ^ expected):
        raise InputError(
            f"the checkpoint of step {step} does not hold the arrays of this model: another version of Podscale "
            "wrote it",
            field=different[0],
            hint="Start a new run.",
        )


@waiting_for(CHECKPOINT)
def restore_or_start(
    checkpoint_store: CheckpointStore,
    resume: str,
    state: TrainState,
    world: World,
    initial_weights: Callable[[], InitialWeights | None] = lambda: None,
) -> bool:
    """Restore the newest complete checkpoint, which rank 0 reads and verifies. Returns False if there is none.

    Raises:
        InputError: on every rank, if rank 0's checkpoints or the initial weights conflict with the run.
    """
    snapshot: Snapshot | None = None
    initial: InitialWeights | None = None
    input_error: InputError | None = None
    if world.is_rank0:
        try:
            snapshot = checkpoint_store.restore(resume)
            initial = initial_weights() if snapshot is None else None
        except InputError as error:
            input_error = error
    is_restored, input_error = world.broadcast((snapshot is not None, input_error))
    if input_error is not None:
        raise input_error
    state.load_from_rank0(snapshot, world, initial)
    return bool(is_restored)


class Ema:
    """Exponential moving average of the weights and of batch norm's running statistics, on the device.

        average = decay * average + (1 - decay) * weights,  after every `every` steps

    It begins with the initial weights, without bias correction, as in timm, torchvision's reference and Composer. A
    masked step counts: its unchanged weights are averaged once more. Each rank averages the weights that it steps, so a
    sharded optimizer step shards this memory too. It is not part of a CUDA graph: the host decides which steps count.

    `values` holds the averages of this rank's weights, fp32, in the order of `FlatWeights.local_masters`. `buffers`
    holds those of batch norm's running statistics by name, equal on all ranks.
    """

    def __init__(
        self, model: nn.Module, read_weights: Callable[[], Sequence[Tensor]], *, decay: float, every: int
    ) -> None:
        """Start from the model's current values; `read_weights` has the order of `FlatWeights.local_masters`."""
        self._model, self._read_weights = model, read_weights
        self._decay, self._every = decay, every
        self.values = torch.cat(list(read_weights()))
        self.buffers = {name: buffer.clone() for name, buffer in running_statistics(model).items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after `step`, if the step is a multiple of `every`."""
        if step % self._every:
            return
        weights = self._read_weights()
        averages = list(self.values.split([len(part) for part in weights]))
        statistics = running_statistics(self._model).values()
        torch._foreach_lerp_([*averages, *self.buffers.values()], [*weights, *statistics], 1.0 - self._decay)


def build_ema(section: EmaSection, model: nn.Module, read_weights: Callable[[], Sequence[Tensor]]) -> Ema | None:
    """Build the average of a document's ema section; None if it has none. For `read_weights` see `Ema`."""
    if section.decay is None:
        return None
    return Ema(model, read_weights, decay=section.decay, every=section.every_steps)


def load_weights_file(model: nn.Module, path: Path) -> None:
    """Load exported weights into `model`. Raises InputError if they are missing or of another architecture."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model_arrays(model).items()}
    load_arrays(model, read_weights(path, shapes))


def load_arrays(model: nn.Module, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Load `arrays`, parameters and running statistics by name, into `model`, in place."""
    with torch.no_grad():
        for name, tensor in model_arrays(model).items():
            tensor.copy_(torch.from_numpy(arrays[name]))


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a contiguous copy of `tensor` in host memory, in the logical (OIHW) order of dimensions."""
    detached = tensor.detach()
    if detached.device.type != "cpu":  # reordered on the device; the transfer is the copy
        array: npt.NDArray[Any] = detached.contiguous().cpu().numpy()
        return array
    return np.array(detached.numpy(), order="C", copy=True)  # torch's copy has no huge pages and takes twice the time
