"""Between the engine's state and the engine-neutral arrays of a checkpoint.

A trained model's weights, as every engine exports them, into a network.

An exponential moving average of the weights and of batch norm's running statistics, on the device.

    average = decay * average + (1 - decay) * weights,  after every so many updates

It begins with the initial weights and has no correction for that, as in timm, torchvision's reference and Composer.
A masked update counts as one: its weights, those from before, are averaged once more. Each rank averages what it
updates, so a sharded update shares the memory out too. Nothing here is part of a recorded graph: whether an update is
the last of `every` is the host's to know.
"""

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
from podscale.pytorch.optim import ExtraStateOptimizer, LookaheadOptimizer, Optimizer
from podscale.pytorch.precision import Precision
from podscale.pytorch.world import World
from podscale.runs.checkpoint import CheckpointStore, Snapshot
from podscale.runs.model_files import read_weights
from podscale.training.model_weights import InitialWeights
from podscale.training.run_progress import RunProgress


def load_weights_file(model: nn.Module, path: Path) -> None:
    """Loads exported weights into `model`, in place.

    Raises InputError where the file is missing or holds another architecture.
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    load_arrays(model, read_weights(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}))


def load_arrays(model: nn.Module, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Loads parameters and buffers by their names into `model`, in place."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(arrays[name]))


class Ema:
    """`values`: the average of this rank's share of the weights, fp32, in the order of `Weights.own`; `buffers`: those
    of the model's buffers by name, equal on all ranks."""

    def __init__(
        self, model: nn.Module, read_weights: Callable[[], Sequence[Tensor]], *, decay: float, every: int = 1
    ) -> None:
        """Begins with the values that the model has. read_weights: this rank's weights as they are, in the order of
        them.
        """
        self._model, self._read_weights = model, read_weights
        self._decay, self._every = decay, every
        self.values = torch.cat(list(read_weights()))
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights as they are after `step` updates, where this is one of those that count."""
        if step % self._every:
            return
        updated = self._read_weights()
        mine = list(self.values.split([len(part) for part in updated]))
        torch._foreach_lerp_([*mine, *self.buffers.values()], [*updated, *self._model.buffers()], 1.0 - self._decay)

    @torch.no_grad()
    def reset(self) -> None:
        """Begins again with the values that the model has now."""
        for kept, now in zip(self.buffers.values(), self._model.buffers(), strict=True):
            kept.copy_(now)
        self.values.copy_(torch.cat(list(self._read_weights())))


def build_ema(section: EmaSection, model: nn.Module, read_weights: Callable[[], Sequence[Tensor]]) -> Ema | None:
    """The average that the document asks for."""
    if section.decay is None:
        return None
    return Ema(model, read_weights, decay=section.decay, every=section.every_steps)


@dataclass(frozen=True)
class TrainState:
    """Everything that a resumed run needs, equal on all ranks."""

    model: nn.Module
    weights: FlatWeights
    optimizer: Optimizer
    precision: Precision
    progress: RunProgress
    ema: Ema | None = None

    @property
    def optimizer_bytes(self) -> int:
        """What this rank keeps for its updates beside the weights that the model computes with."""
        kept = [*self.optimizer.moments.values()]
        if self.weights.masters is not self.weights.model_weights:
            kept.append(self.weights.masters)
        if self.ema is not None:
            kept.append(self.ema.values)
        shaped = self.optimizer.extra_state_bytes if isinstance(self.optimizer, ExtraStateOptimizer) else 0
        return shaped + sum(tensor.nbytes for tensor in kept)

    def tensors(self) -> dict[str, Tensor]:
        """All arrays by their names in a checkpoint, whole and in fp32; all ranks call it.

        None depends on how the update is sharded or on the format in which the model computes.
        """
        return self._named_tensors(self._flat_tensors(), self._extra_state())

    @contextmanager
    def with_weights(self, *, averaged: bool = False) -> Iterator[nn.Module]:
        """The model with the weights that updates have reached, or with averages; all ranks enter it together.

        Afterwards it holds the values that updates go on from, to the bit.
        """
        flat, values = self._evaluation_tensors(averaged=averaged)
        buffers = dict(self.model.named_buffers())
        kept = {name: buffers[name].clone() for name in values}
        with self.weights.swapped(flat) if flat is not None else nullcontext(), torch.no_grad():
            try:
                for name, value in values.items():
                    buffers[name].copy_(value)
                yield self.model
            finally:
                for name, value in kept.items():
                    buffers[name].copy_(value)

    @waiting_for(CHECKPOINT)
    def model_arrays(self, *, averaged: bool = False) -> dict[str, npt.NDArray[Any]]:
        """Of what is evaluated, fp32 weights and buffers by their names in the model; all ranks call it."""
        flat, values = self._evaluation_tensors(averaged=averaged)
        weights = self.weights.named_views(self.weights.unshard_masters() if flat is None else flat)
        tensors = weights | dict(self.model.named_buffers()) | values
        return {name: as_array(tensor) for name, tensor in tensors.items()}

    @waiting_for(CHECKPOINT)
    def _evaluation_tensors(self, *, averaged: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The whole fp32 weights to evaluate, and buffers by name, where they are not those of the model itself."""
        if averaged:
            assert self.ema is not None
            return self.weights.unshard(self.ema.values), self.ema.buffers
        if isinstance(self.optimizer, LookaheadOptimizer):
            return self.weights.unshard(self.optimizer.evaluation_weights()), {}
        return None, {}

    @waiting_for(CHECKPOINT)
    def capture(self, world: World) -> Snapshot | None:
        """A copy of the state in memory of rank 0, after which training may go on; all ranks call it."""
        tensors = self.tensors()
        if not world.is_rank0:
            return None
        arrays = {name: as_array(tensor) for name, tensor in tensors.items()}
        return Snapshot(self.progress.step, arrays, {**self._meta(), "ranks": world.size})

    @waiting_for(CHECKPOINT)
    def load_from_rank0(
        self, snapshot: Snapshot | None, world: World, initial_weights: InitialWeights | None = None
    ) -> None:
        """Brings all ranks to the state of rank 0, which takes over `snapshot` first, or else `origin`."""
        flat, arrays = self._flat_tensors(), self._extra_state()
        named = self._named_tensors(flat, arrays)
        if snapshot is not None:
            self._load_snapshot(snapshot, named)
        elif initial_weights is not None:
            self._load_initial_weights(initial_weights, named)
        meta: list[Any] = [self._meta() if world.is_rank0 else None]
        dist.broadcast_object_list(meta, src=0, device=torch.device("cpu"))
        self._load_meta(meta[0])
        tensors = [*flat.values(), *arrays.values(), *self.model.buffers(), *self.optimizer.scalars.values()]
        tensors += self.ema.buffers.values() if self.ema is not None else ()
        message = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(message, src=0)
        for tensor, part in zip(tensors, message.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))
        self.weights.load_masters(flat.pop("model"))
        for name, values in self.optimizer.moments.items():
            values.copy_(self.weights.local(flat[f"optimizer/{name}"]))
        if isinstance(self.optimizer, ExtraStateOptimizer):
            self.optimizer.load_extra_state({name.removeprefix("optimizer/"): array for name, array in arrays.items()})
        if self.ema is not None:
            self.ema.values.copy_(self.weights.local(flat["ema"]))

    def _flat_tensors(self) -> dict[str, Tensor]:
        """Masters, moments and averages in the whole flat layout, gathered where they are sharded."""
        moments = {f"optimizer/{name}": self.weights.unshard(v) for name, v in self.optimizer.moments.items()}
        ema = {} if self.ema is None else {"ema": self.weights.unshard(self.ema.values)}
        return {"model": self.weights.unshard_masters(), **moments, **ema}

    def _extra_state(self) -> dict[str, Tensor]:
        """What the rule keeps in shapes of its own, whole."""
        arrays = self.optimizer.extra_state_arrays() if isinstance(self.optimizer, ExtraStateOptimizer) else {}
        return {f"optimizer/{name}": array for name, array in arrays.items()}

    def _named_tensors(self, flat: dict[str, Tensor], arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every array by its name, as views of these buffers and of what is kept besides."""
        named = {
            f"{kind}/{n}": tensor
            for kind, whole in flat.items()
            for n, tensor in self.weights.named_views(whole).items()
        }
        named |= {f"model/{name}": buffer for name, buffer in self.model.named_buffers()}
        if self.ema is not None:
            named |= {f"ema/{name}": buffer for name, buffer in self.ema.buffers.items()}
        return named | arrays | {f"optimizer/{name}": scalar for name, scalar in self.optimizer.scalars.items()}

    def _meta(self) -> dict[str, Any]:
        return {"progress": asdict(self.progress), "precision": self.precision.state_dict()}

    def _load_snapshot(self, snapshot: Snapshot, tensors: dict[str, Tensor]) -> None:
        missing = sorted(tensors.keys() ^ snapshot.arrays.keys())
        if missing:
            raise InputError(
                f"the checkpoint of step {snapshot.step} does not hold the arrays of this model: another version of "
                "Podscale wrote it",
                field=missing[0],
                hint="Start a new run.",
            )
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(np.array(snapshot.arrays[name])))
        self._load_meta(snapshot.meta)

    def _load_initial_weights(self, initial_weights: InitialWeights, tensors: dict[str, Tensor]) -> None:
        """The weights and statistics of another run; all else stays as in a new one."""
        for name, values in initial_weights.arrays.items():
            for kind in ("model", "ema"):
                if f"{kind}/{name}" in tensors:
                    tensors[f"{kind}/{name}"].copy_(torch.from_numpy(np.array(values)))
        self.progress.origin = initial_weights.provenance

    def _load_meta(self, meta: dict[str, Any]) -> None:
        for name, value in meta["progress"].items():
            setattr(self.progress, name, value)
        self.precision.load_state_dict(meta["precision"])


@waiting_for(CHECKPOINT)
def restore_or_start(
    checkpoint_store: CheckpointStore,
    resume: str,
    state: TrainState,
    world: World,
    initial_weights: Callable[[], InitialWeights | None] = lambda: None,
) -> bool:
    """Continues from the newest whole checkpoint, read and verified by rank 0; whether there was one.

    initial_weights: what a new run begins with. Raises InputError on every rank where rank 0's checkpoints, or that
    origin, conflict with the run.
    """
    snapshot: Snapshot | None = None
    begun: InitialWeights | None = None
    refusal: InputError | None = None
    if world.is_rank0:
        try:
            snapshot = checkpoint_store.restore(resume)
            begun = initial_weights() if snapshot is None else None
        except InputError as error:
            refusal = error
    answer: list[Any] = [(snapshot is not None, refusal)]
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    found, refusal = answer[0]
    if refusal is not None:
        raise refusal
    state.load_from_rank0(snapshot, world, begun)
    return bool(found)


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """A contiguous copy in host memory, in the logical (OIHW) order of dimensions."""
    detached = tensor.detach()
    if detached.device.type != "cpu":  # the way off the device is a copy; the order of dimensions is changed there
        array: npt.NDArray[Any] = detached.contiguous().cpu().numpy()
        return array
    return np.array(detached.numpy(), order="C", copy=True)  # NumPy's copy: torch's has no huge pages and costs twice
