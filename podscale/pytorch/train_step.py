"""Train step: forward, backward, average over the ranks, masked optimizer step.

A masked step is one that changes nothing, because a loss or gradient was not finite.

The step never waits for the device. It reads no host value that changes from step to step, so a CUDA graph can record
it: the schedule is a table on the device, indexed by a step counter on the device.

Dropout draws from the device's generator, which is seeded before each step from (seed, step, rank). So a resumed run
draws what the uninterrupted run drew, ranks draw differently, and a replayed CUDA graph, which reads the generator's
seed at its start, draws anew in every step.

torch.compile covers the forward pass and, through it, backward. On one rank the whole forward pass is one graph. With
several ranks it is one graph per region of the network (stem, each stage, head): the gradients of a graph all arrive at
its end, so with one graph no bucket could be reduced while backward is running. The reducer's hooks stay outside the
graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podscale.data.rng import derive_key
from podscale.distributed.waits import OPTIMIZER, waiting_for
from podscale.pytorch.batch_norm.layer import RunningStatistics
from podscale.pytorch.device_prefetcher import BatchMixer, DeviceBatch
from podscale.pytorch.fine_tuning import RateScales
from podscale.pytorch.flat_buffers import FlatWeights
from podscale.pytorch.models import AlexNet, Inception, InceptionOutputs, Outputs, ResNet
from podscale.pytorch.optim import HyperParams, Optimizer, StepAware
from podscale.pytorch.precision import Precision
from podscale.pytorch.reducer import GradientReducer, no_sync_unless_last
from podscale.pytorch.world import World
from podscale.training.step_timer import PhaseTimer


@dataclass(frozen=True)
class TrainingLoss:
    """Mean training loss of a network's outputs, fp32.

    Args:
        label_smoothing: probability mass of the target that is spread over all classes.
        auxiliary_weight: weight of an auxiliary head's loss (Inception).
        is_binary: binary cross entropy per class, mean over classes (Wightman 2021), instead of softmax.
        threshold: with `is_binary`, targets above it count as 1 and others as 0; None keeps them as they are.
    """

    label_smoothing: float
    auxiliary_weight: float = 0.0
    is_binary: bool = False
    threshold: float | None = None

    def __call__(self, outputs: Outputs, labels: Tensor, mix_weight: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar on the device.

        Args:
            outputs: logits [n, classes], and those of the auxiliary head for Inception.
            labels: int64 [n].
            mix_weight: weight of each image's own label, scalar; the rest goes to the label of the image that it was
                mixed with, which is image n - 1 - i for image i. None if images are not mixed.
        """
        if not isinstance(outputs, InceptionOutputs):
            return self._head_loss(outputs, labels, mix_weight)
        auxiliary_loss = self._head_loss(outputs.auxiliary, labels, mix_weight)
        return self._head_loss(outputs.logits, labels, mix_weight) + self.auxiliary_weight * auxiliary_loss

    def _head_loss(self, logits: Tensor, labels: Tensor, mix_weight: Tensor | None) -> Tensor:
        if self.is_binary:
            targets = self._binary_targets(labels, logits.shape[1], mix_weight)
            return F.binary_cross_entropy_with_logits(logits.float(), targets)
        own_loss = smoothed_cross_entropy(logits, labels, self.label_smoothing)
        if mix_weight is None:
            return own_loss
        return mix_weight * own_loss + (1 - mix_weight) * smoothed_cross_entropy(
            logits, labels.flip(0), self.label_smoothing
        )

    def _binary_targets(self, labels: Tensor, classes: int, mix_weight: Tensor | None) -> Tensor:
        targets = (labels[:, None] == torch.arange(classes, device=labels.device)).float()
        if mix_weight is not None:
            targets = mix_weight * targets + (1 - mix_weight) * targets.flip(0)
        targets = (1 - self.label_smoothing) * targets + self.label_smoothing / classes
        return targets if self.threshold is None else torch.gt(targets, self.threshold).float()


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return the mean cross entropy in fp32 with label smoothing (Szegedy 2016, section 7).

    Args:
        logits: [n, classes], any float dtype.
        labels: int64 [n].
        smoothing: probability mass of the target that is spread over all classes.
    """
    return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)


OWN_NETWORKS = (ResNet, AlexNet, Inception)
_DROPOUT_KEY_DOMAIN = 0x64726F70  # "drop"


class DropoutRng:
    """Seeding of a rank's generators for dropout, before each step. Does nothing for our networks without dropout.

    A model from elsewhere may draw at any place, also from the CPU's generator on a GPU.
    """

    def __init__(self, model: nn.Module, seed: int, world: World, *, is_external: bool = False) -> None:
        self._has_dropout = is_external or any(getattr(module, "dropout", 0.0) for module in model.modules())
        self._seed, self._rank = seed, world.rank
        self._generators = [torch.cuda.default_generators[world.device.index]] if world.on_gpu else []
        if is_external or not world.on_gpu:
            self._generators.append(torch.default_generator)

    def start_step(self, step: int) -> None:
        """Seed the generators for step `step`, from 0. Never call it while a CUDA graph is being recorded."""
        if self._has_dropout:
            seed = int(derive_key(self._seed, _DROPOUT_KEY_DOMAIN, step, self._rank)[0] >> 1)
            for generator in self._generators:
                generator.manual_seed(seed)


ForwardFunction = Callable[[Tensor], Outputs]
Region = Callable[[Any], Any]
"""Consecutive layers of a network, as one function."""


def build_forward(
    prepare: Callable[[Tensor], Tensor],
    module: nn.Module,
    mode: str,
    *,
    ranks: int,
    backend: str | Callable[..., Any] = "inductor",
) -> ForwardFunction:
    """Return the forward function of a step: `prepare`, then `module`, compiled if `mode` is not "off".

    Args:
        prepare: normalises and mixes images, uint8 [n, height, width, 3] to float [n, 3, height, width].
        mode: "off", or the `mode` of torch.compile.
        ranks: world size; one graph for the whole network if it is 1, else one per region. A model from elsewhere has
            no regions.
    """
    if mode == "off":
        return lambda images: cast(Outputs, module(prepare(images)))
    eager_regions: Sequence[Region] = [module]
    if ranks > 1 and isinstance(module, OWN_NETWORKS):
        eager_regions = module.regions()
    first, *rest = eager_regions
    dtype = next(module.parameters()).dtype  # the hook that casts the network's input does not run for a region

    def begin(images: Tensor) -> Outputs:
        return cast(Outputs, first(prepare(images).to(dtype)))

    options: dict[str, Any] = {"mode": mode} if backend == "inductor" else {}
    compiler = cast(Callable[[Region], Region], partial(torch.compile, backend=backend, dynamic=False, **options))
    regions = [compiler(region) for region in (begin, *rest)]
    return lambda images: reduce(lambda x, region: region(x), regions, images)


def allow_compilations(shapes: int) -> None:
    """Let torch.compile compile a function for this many shapes; beyond its own limit it would run uncompiled."""
    import torch._dynamo.config as settings  # takes a second

    settings.recompile_limit = max(settings.recompile_limit, shapes)


@dataclass(frozen=True)
class StepResult:
    """Result of a train step, on the device and equal on all ranks.

    Args:
        loss: mean training loss over the global batch, fp32 scalar.
        finite: False if the step was masked, bool scalar.
        grad_norm: L2 norm of the averaged gradient, fp32 scalar; None if it was not computed.
    """

    loss: Tensor
    finite: Tensor
    grad_norm: Tensor | None = None

    @property
    def loss_and_norm(self) -> Tensor:
        """Loss and, if there is one, gradient norm, fp32 [1 or 2], in one tensor for one copy to the host."""
        return self.loss.reshape(1) if self.grad_norm is None else torch.stack([self.loss, self.grad_norm])


class ForwardBackward:
    """Forward and backward passes of a step, which sum the gradients.

    The reducer averages the loss and the change of batch norm's running statistics in the messages of the gradients.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        precision: Precision,
        statistics: RunningStatistics,
        loss: TrainingLoss,
        *,
        accumulation: int = 1,
        forward: ForwardFunction | None = None,
        mixing: BatchMixer | None = None,
    ) -> None:
        """Build the passes.

        Args:
            accumulation: passes per step, each on an equal part of the batch.
            forward: images of a batch to outputs (see `build_forward`); default: the reducer's module.
            mixing: the mixer that `forward` uses; it gives the loss the weights of the targets.
        """
        assert len(reducer.buffer.extra_values) == 1 + len(statistics)
        self.reducer, self.precision, self.statistics, self.mixing = reducer, precision, statistics, mixing
        self._loss, self.accumulation, self._forward = loss, accumulation, forward or reducer.module

    def __call__(self, batch: DeviceBatch) -> None:
        reducer, passes = self.reducer, self.accumulation
        extra = reducer.buffer.extra_values
        loss_slot, statistics_slot = extra[:1], extra[1:]
        reducer.start_step()
        self.statistics.save()
        size = len(batch.labels) // passes
        for index, (start, stop) in enumerate(pairwise(range(0, size * passes + 1, size))):
            last = index == passes - 1
            with no_sync_unless_last(reducer, last=last):
                with self.precision.autocast():
                    outputs = self._forward(images := batch.images[start:stop])
                mix_weight = self.mixing.mix_weight(*images.shape[1:3]) if self.mixing is not None else None
                loss = self._loss(outputs, batch.labels[start:stop], mix_weight) / passes
                loss_slot += loss.detach()
                if last:
                    self.statistics.write_change(statistics_slot)
                reducer.backward(self.precision.scale_loss(loss), last=last)


class TrainStep:
    """Train step: forward and backward passes, average over the ranks, optimizer step."""

    def __init__(
        self,
        forward_backward: ForwardBackward,
        optimizer: Optimizer,
        weights: FlatWeights,
        schedule: npt.NDArray[np.floating],
        *,
        rate_scales: RateScales | None = None,
        step_aware: Sequence[StepAware] = (),
        norm_every: int = 0,
    ) -> None:
        """Build the step.

        Args:
            schedule: learning rate, momentum and weight decay of each step, `training.schedules.step_table`.
            rate_scales: factors of the learning rate of each weight; None if all are 1.
            step_aware: parts to prepare on the host before each step, besides the optimizer and the mixing of images.
            norm_every: compute the gradient norm every so many steps; 0 for never.
        """
        self.forward_backward, self.optimizer, self.weights = forward_backward, optimizer, weights
        self.reducer, self.precision = forward_backward.reducer, forward_backward.precision
        device = weights.masters.device
        self._schedule = torch.from_numpy(schedule).to(device)
        self._step_index = torch.zeros(1, dtype=torch.int64, device=device)
        self._step_aware = (*step_aware, forward_backward.mixing, optimizer)
        self._norm_every, self._is_norm_due = norm_every, False
        self._rate_scales = rate_scales

    def seek(self, step: int) -> None:
        """Continue after `step` steps, as a resumed run does."""
        self._step_index.fill_(step)

    def set_accumulation(self, passes: int) -> None:
        """Set the passes of the following steps."""
        self.forward_backward.accumulation = passes

    def __call__(self, batch: DeviceBatch, phase: PhaseTimer) -> StepResult:
        self.start_step(batch.host_batch.step)
        return self.run_on_device(batch, phase)

    def start_step(self, step: int) -> None:
        """Prepare step `step`, from 0, on the host, for example seed dropout. `run_on_device` does the rest."""
        self._is_norm_due = self._norm_every > 0 and (step + 1) % self._norm_every == 0
        for part in self._step_aware:
            if isinstance(part, StepAware):
                part.start_step(step)

    def run_on_device(self, batch: DeviceBatch, phase: PhaseTimer) -> StepResult:
        """Run the step: the same sequence of device work every time, so that a CUDA graph can record it."""
        with phase("forward_backward"):
            self.forward_backward(batch)
        with phase("allreduce_wait"):
            self.reducer.finish()
        with phase("optimizer"):
            return self._apply_gradients()

    def _apply_gradients(self) -> StepResult:
        """Run the optimizer step, masked if the loss or a gradient is not finite.

        All ranks decide the same, because a NaN of any rank is in the averages of every rank. If the optimizer step is
        sharded, the NaN may be in one rank's shard only, so the optimizer exchanges the flag along with its norms.
        """
        buffer = self.reducer.buffer
        loss = buffer.extra_values[0].clone()
        finite = all_finite([*buffer.averages, buffer.extra_values])
        zero_nonfinite(finite, buffer.averages)
        self.precision.unscale(buffer.averages)
        norm = torch.stack(torch._foreach_norm(buffer.averages)).norm() if self._needs_grad_norm() else None
        if self._rate_scales is not None:
            self._rate_scales.save()
        with waiting_for(OPTIMIZER):
            finite = self.optimizer.step(self._next_hyperparams(loss), finite)
        if self._rate_scales is not None:
            self._rate_scales.apply()
        self.weights.all_gather()
        self.precision.update_loss_scale(finite)
        self.forward_backward.statistics.apply_change(buffer.extra_values[1:], finite)
        return StepResult(loss, finite, norm)

    def _needs_grad_norm(self) -> bool:
        """Return True if this step computes the gradient norm. A step recorded in a CUDA graph always computes it."""
        may_record = self._norm_every > 0 and self._step_index.is_cuda  # the query below fails without a driver
        return self._is_norm_due or (may_record and torch.cuda.is_current_stream_capturing())

    def _next_hyperparams(self, loss: Tensor) -> HyperParams:
        """Return the schedule's row of this step with the loss. Advances the step counter, also in a masked step."""
        row = self._schedule.index_select(0, self._step_index)[0]
        self._step_index += 1
        learning_rate, momentum, weight_decay = row.unbind()
        return HyperParams(learning_rate, momentum, weight_decay, loss)


def zero_nonfinite(finite: Tensor, buffers: list[Tensor]) -> None:
    """Zero the `buffers` if `finite` (scalar) is False. On a CPU the host reads the flag: it saves two passes."""
    if finite.device.type == "cpu" and finite:
        return
    for buffer in buffers:
        buffer.masked_fill_(~finite, 0.0)


def all_finite(buffers: list[Tensor]) -> Tensor:
    """Return a bool scalar on the device, True if all elements of `buffers` are finite; one pass, no temporaries."""
    return torch.isfinite(torch.stack(torch._foreach_norm(buffers, float("inf"))).amax())
