"""One update: forward, backward, average over the ranks, masked parameter update.

Nothing here waits for the device, and nothing depends on a number of the host that changes from step to step: the
schedule lies on the device as a table, and so does the number of the update that indexes it.

The training loss.

Random numbers that an update draws itself (dropout), keyed like everything else that is random in a run.

Before each update the device's generator is set to a key of (seed, update, rank). So a resumed run draws what the
uninterrupted one drew, ranks draw differently, and a replayed CUDA graph, which reads the generator's seed when it
starts, draws anew in every update.

torch.compile for the forward pass and, through it, for backward.

Alone, the whole forward pass is one graph. With other ranks it is one graph per region of the network, because the
gradients of a graph all arrive at its end: as one graph, no bucket could be on its way while backward is running.
The reducer's hooks stay outside; gradients are accumulated into its buffer as ever.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podscale.config import RunConfig
from podscale.data.rng import derive_key
from podscale.distributed.waits import OPTIMIZER, waiting_for
from podscale.pytorch.batch_norm.layer import RunningStatistics
from podscale.pytorch.device_prefetcher import BatchMixer, DeviceBatch
from podscale.pytorch.flat_buffers import FlatWeights
from podscale.pytorch.models import AlexNet, Inception, InceptionOutputs, Outputs, ResNet
from podscale.pytorch.optim import HyperParams, Optimizer, StepAware
from podscale.pytorch.precision import Precision
from podscale.pytorch.reducer import GradientReducer, no_sync_unless_last
from podscale.pytorch.world import World
from podscale.training.training_logger import PhaseTimer


@dataclass(frozen=True)
class TrainingLoss:
    """The mean training loss of a network's outputs, fp32.

    label_smoothing: mass of the target spread over all classes. auxiliary_weight: weight of an auxiliary head's loss.
    is_binary: one yes or no for each class instead of one choice among them (Wightman 2021), the mean over classes;
    with a `threshold`, targets above it count as 1 and others as 0.
    """

    label_smoothing: float
    auxiliary_weight: float = 0.0
    is_binary: bool = False
    threshold: float | None = None

    def __call__(self, outputs: Outputs, labels: Tensor, mix_weight: Tensor | None = None) -> Tensor:
        """outputs: of n images; labels: int64 [n]. mix_weight: scalar, the weight of each image's own label where
        images are mixed; the rest is that of its counterpart from the end."""
        if isinstance(outputs, InceptionOutputs):
            return self._head_loss(outputs.logits, labels, mix_weight) + self.auxiliary_weight * self._head_loss(
                outputs.auxiliary, labels, mix_weight
            )
        return self._head_loss(outputs, labels, mix_weight)

    def _head_loss(self, logits: Tensor, labels: Tensor, mix_weight: Tensor | None) -> Tensor:
        if self.is_binary:
            targets = self._binary_targets(labels, logits.shape[1], mix_weight)
            return F.binary_cross_entropy_with_logits(logits.float(), targets)
        own = smoothed_cross_entropy(logits, labels, self.label_smoothing)
        if mix_weight is None:
            return own
        return mix_weight * own + (1 - mix_weight) * smoothed_cross_entropy(
            logits, labels.flip(0), self.label_smoothing
        )

    def _binary_targets(self, labels: Tensor, classes: int, mix_weight: Tensor | None) -> Tensor:
        targets = (labels[:, None] == torch.arange(classes, device=labels.device)).float()
        if mix_weight is not None:
            targets = mix_weight * targets + (1 - mix_weight) * targets.flip(0)
        targets = (1 - self.label_smoothing) * targets + self.label_smoothing / classes
        return targets if self.threshold is None else torch.gt(targets, self.threshold).float()


def build_loss(config: RunConfig) -> TrainingLoss:
    """The loss of a document."""
    train = config.train
    binary = train.loss == "binary_cross_entropy"
    return TrainingLoss(train.label_smoothing, config.model.inception.auxiliary, binary, train.binary_threshold)


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Mean cross entropy in fp32 against targets that spread `smoothing` over all classes (Szegedy 2016, section 7).

    logits: [n, classes] of any float type; labels: int64 [n].
    """
    return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)


_DROPOUT_KEY_DOMAIN = 0x64726F70  # "drop"


class DropoutRng:
    """Sets the generator of a rank's device; does nothing for a model that draws nothing."""

    def __init__(self, model: nn.Module, seed: int, world: World) -> None:
        self._has_dropout = any(getattr(module, "dropout", 0.0) for module in model.modules())
        self._seed, self._rank = seed, world.rank
        self._generator = torch.cuda.default_generators[world.device.index] if world.on_gpu else torch.default_generator

    def start_step(self, step: int) -> None:
        """To be called before update `step` (from 0), never while a CUDA graph is being recorded."""
        if self._has_dropout:
            self._generator.manual_seed(int(derive_key(self._seed, _DROPOUT_KEY_DOMAIN, step, self._rank)[0] >> 1))


PrepareFunction = Callable[[Tensor], Tensor]
ForwardFunction = Callable[[Tensor], Outputs]
Region = Callable[[Any], Any]
CompileMode = Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def build_forward(
    prepare: PrepareFunction,
    module: nn.Module,
    mode: CompileMode,
    *,
    ranks: int,
    backend: str | Callable[..., Any] = "inductor",
) -> ForwardFunction:
    """What a step calls with a batch's images: `prepare`, then `module` (the network, or its DDP wrapper)."""
    if mode == "off":
        return lambda images: cast(Outputs, module(prepare(images)))
    parts: Sequence[Region] = [module]
    if ranks > 1 and isinstance(module, ResNet | AlexNet | Inception):
        parts = module.regions()
    first, *rest = parts
    dtype = next(module.parameters()).dtype  # a region sees nothing of the network's own hooks

    def begin(images: Tensor) -> Outputs:
        return cast(Outputs, first(prepare(images).to(dtype)))

    chosen: dict[str, Any] = {"mode": mode} if backend == "inductor" else {}
    compiler = cast(Callable[[Region], Region], partial(torch.compile, backend=backend, dynamic=False, **chosen))
    regions = [compiler(region) for region in (begin, *rest)]
    return lambda images: reduce(lambda x, region: region(x), regions, images)


def release_cuda_graphs(mode: CompileMode) -> None:
    """Ends the compiler's own CUDA graphs: NCCL waits at the end of a communicator for graphs with a call on it."""
    if mode in ("reduce-overhead", "max-autotune") and torch.cuda.is_available():
        torch.compiler.reset()


@dataclass(frozen=True)
class StepResult:
    """What is known of an update, still on the device and equal on all ranks.

    loss: mean training loss over the global batch. finite: whether the update was carried out. grad_norm: Euclidean
    norm of the averaged gradient, where it was taken.
    """

    loss: Tensor
    finite: Tensor
    grad_norm: Tensor | None = None

    @property
    def loss_and_norm(self) -> Tensor:
        """Loss and, where there is one, norm: fp32 [1 or 2], what the host is told once it has arrived there."""
        return self.loss.reshape(1) if self.grad_norm is None else torch.stack([self.loss, self.grad_norm])


class TrainStep:
    """Carries out updates. The loss and batch norm's running statistics are averaged along with the gradients."""

    def __init__(
        self,
        reducer: GradientReducer,
        optimizer: Optimizer,
        weights: FlatWeights,
        precision: Precision,
        statistics: RunningStatistics,
        *,
        schedule: Tensor,
        loss: TrainingLoss,
        accumulation: int = 1,
        forward: ForwardFunction | None = None,
        dropout_rng: DropoutRng | None = None,
        mixing: BatchMixer | None = None,
        norm_every: int = 0,
    ) -> None:
        """`schedule`: fp32 [updates, schedules.COLUMNS], on the device.

        `mixing`: what `forward` mixes images by; the loss asks it for the targets' shares.
        `forward`: a batch's images to outputs (see compilation); default: the reducer's module as it is. `norm_every`:
        updates between two in which the norm of the gradient is taken; 0 = never.
        """
        assert len(reducer.buffer.extra_values) == 1 + len(statistics)
        self._reducer, self._optimizer, self._weights = reducer, optimizer, weights
        self._precision, self._statistics = precision, statistics
        self._schedule, self._step_index = schedule, torch.zeros(1, dtype=torch.int64, device=schedule.device)
        self._loss, self._accumulation = loss, accumulation
        self._forward = forward or reducer.module
        self._dropout_rng, self._mixing = dropout_rng, mixing
        self._norm_every, self._is_norm_due = norm_every, False

    def seek(self, step: int) -> None:
        """The next update is the one after `number` updates: what a resumed run begins with."""
        self._step_index.fill_(step)

    def __call__(self, batch: DeviceBatch, phase: PhaseTimer) -> StepResult:
        self.start_step(batch.host_batch.step)
        return self.run_on_device(batch, phase)

    def start_step(self, step: int) -> None:
        """What the host does before update `step`, from 0; the rest is the device's."""
        self._is_norm_due = self._norm_every > 0 and (step + 1) % self._norm_every == 0
        if self._dropout_rng is not None:
            self._dropout_rng.start_step(step)
        if self._mixing is not None:
            self._mixing.start_step(step)
        if isinstance(self._optimizer, StepAware):
            self._optimizer.start_step(step)

    def run_on_device(self, batch: DeviceBatch, phase: PhaseTimer) -> StepResult:
        """The update itself: the same sequence of work for the device every time."""
        with phase("forward_backward"):
            self._forward_backward(batch)
        with phase("allreduce_wait"):
            self._reducer.finish()
        with phase("optimizer"):
            return self._apply_gradients()

    def _forward_backward(self, batch: DeviceBatch) -> None:
        reducer, parts = self._reducer, self._accumulation
        extra = reducer.buffer.extra_values
        loss_slot, statistics_slot = extra[:1], extra[1:]
        reducer.start_step()
        self._statistics.save()
        size = len(batch.labels) // parts
        for number, (start, stop) in enumerate(pairwise(range(0, size * parts + 1, size))):
            last = number == parts - 1
            with no_sync_unless_last(reducer, last=last):
                with self._precision.autocast():
                    outputs = self._forward(images := batch.images[start:stop])
                share = self._mixing.mix_weight(*images.shape[1:3]) if self._mixing is not None else None
                loss = self._loss(outputs, batch.labels[start:stop], share) / parts
                loss_slot += loss.detach()
                if last:
                    self._statistics.write_change(statistics_slot)
                reducer.backward(self._precision.scale_loss(loss), last=last)

    def _apply_gradients(self) -> StepResult:
        """Masks a non-finite update.

        A NaN of any rank is in everybody's averages; where the update is sharded, it may be in another rank's shard
        alone, and the optimizer asks the others along with its norms. So all decide alike.
        """
        buffer = self._reducer.buffer
        loss = buffer.extra_values[0].clone()
        finite = all_finite([*buffer.averages, buffer.extra_values])
        zero_nonfinite(finite, buffer.averages)
        self._precision.unscale(buffer.averages)
        norm = torch.stack(torch._foreach_norm(buffer.averages)).norm() if self._needs_grad_norm() else None
        with waiting_for(OPTIMIZER):
            finite = self._optimizer.step(self._next_hyperparams(loss), finite)
        self._weights.all_gather()
        self._precision.update_loss_scale(finite)
        self._statistics.apply_change(buffer.extra_values[1:], finite)
        return StepResult(loss, finite, norm)

    def _needs_grad_norm(self) -> bool:
        """Whether this update takes the gradient's norm; one that is being recorded does it for all replays."""
        may_record = self._norm_every > 0 and self._step_index.is_cuda  # asking costs an error where there is no driver
        return self._is_norm_due or (may_record and torch.cuda.is_current_stream_capturing())

    def _next_hyperparams(self, loss: Tensor) -> HyperParams:
        """The schedule's row of this update, and its loss; a masked one uses up its row."""
        row = self._schedule.index_select(0, self._step_index)[0]
        self._step_index += 1
        rate, momentum, decay = row.unbind()
        return HyperParams(rate, momentum, decay, loss)


def zero_nonfinite(finite: Tensor, buffers: list[Tensor]) -> None:
    """Zeroes the buffers where not finite. On a CPU nobody waits for the answer, and two passes are saved."""
    if finite.device.type == "cpu" and finite:
        return
    for buffer in buffers:
        buffer.masked_fill_(~finite, 0.0)


def all_finite(buffers: list[Tensor]) -> Tensor:
    """Whether every element is finite, as a bool scalar on the device, in one pass and without temporaries."""
    return torch.isfinite(torch.stack(torch._foreach_norm(buffers, float("inf"))).amax())
