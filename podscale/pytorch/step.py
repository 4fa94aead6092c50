"""One update: forward, backward, average over the ranks, masked parameter update.

Nothing here waits for the device, and nothing depends on a number of the host that changes from step to step: the
schedule lies on the device as a table, and so does the number of the update that indexes it.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from podscale.distributed.waits import OPTIMIZER, waiting_for
from podscale.pytorch.compilation import ForwardFunction
from podscale.pytorch.feed import DeviceBatch
from podscale.pytorch.loss import TrainingLoss
from podscale.pytorch.mixing import BatchMixer
from podscale.pytorch.optim import HyperParams, Optimizer, StepAware
from podscale.pytorch.precision import Precision
from podscale.pytorch.randomness import DropoutRng
from podscale.pytorch.reducer import GradientReducer, no_sync_unless_last
from podscale.pytorch.statistics import RunningStatistics
from podscale.pytorch.weights import FlatWeights
from podscale.training.training_logger import PhaseTimer


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
