"""Training loop of one rank: train steps, evaluate, save checkpoints, stop.

An engine implements `Trainer`'s abstract methods in its own `trainer` module.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from podscale import models
from podscale.config import RunConfig
from podscale.data.loaders.base import Loader
from podscale.distributed.rank_group import World
from podscale.distributed.step_status import StepStatus, StepSync, StopRequest
from podscale.errors import PodscaleError, Preempted
from podscale.runs.checkpoint import CheckpointStore, Snapshot
from podscale.training import schedules
from podscale.training.gauges import Gauges
from podscale.training.model_weights import EPOCH_KEY, InitialWeights, TrainedModel, export_model
from podscale.training.run_progress import EvaluationResult, RunProgress
from podscale.training.training_logger import TrainingLogger

NONFINITE_MESSAGE = "had a loss or gradient that is not finite"
"""Error text for a non-finite loss or gradient."""


class TrainState(Protocol):
    """Training state that a checkpoint holds, equal on all ranks."""

    @property
    def progress(self) -> RunProgress: ...

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state and fp32 masters on this rank, without the weights of the model."""
        ...


class Evaluator(Protocol):
    """Evaluates a model over the validation split of `count` images."""

    count: int


@dataclass(kw_only=True)
class Trainer(ABC):
    """One rank of a training run. Every decision here is the same on all ranks; an engine does the computing."""

    config: RunConfig
    world: World
    classes: list[str]
    spec: models.ModelSpec
    model_directory: Path
    state: TrainState
    loader: Loader
    evaluation_loader: Loader
    evaluator: Evaluator
    step_sync: StepSync
    training_logger: TrainingLogger
    checkpoint_store: CheckpointStore
    stop_request: StopRequest
    initial_weights: Callable[[], InitialWeights | None]
    """Loads the initial weights of a run that has no checkpoint. Rank 0 calls it."""
    training_images: int
    stop_agreed: bool = False
    """All ranks have agreed to stop."""
    _image_size: int = field(default=0, init=False)
    """Side of the newest training images, pixels; 0 before the first."""

    @abstractmethod
    def restore(self) -> bool:
        """Restore the newest complete checkpoint on every rank. Returns False if there is none.

        Raises InputError on every rank if the checkpoints conflict with the run.
        """

    @abstractmethod
    def train_steps(self) -> Iterator[list[StepStatus]]:
        """Train to the end of the run. Yield the step statuses that are due, after each step or after several.

        An engine that runs several steps at once stops at every step for which `is_due_after` is true.
        """

    @abstractmethod
    def evaluate_weights(self, *, averaged: bool) -> EvaluationResult | None:
        """Evaluate the current state. The result is the same on all ranks; None if any rank was asked to stop.

        Args:
            averaged: evaluate the running average of the weights, if the document keeps one.
        """

    @abstractmethod
    def capture_state(self) -> Snapshot | None:
        """Return a copy of the state in rank 0's host memory, None on other ranks. All ranks call it.

        Training may continue while the copy is written.
        """

    @abstractmethod
    def model_arrays(self, *, averaged: bool) -> dict[str, npt.NDArray[Any]]:
        """Return the fp32 weights and buffers by the model spec's names, on rank 0. All ranks call it.

        Args:
            averaged: as in `evaluate_weights`.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def device_memory(self) -> dict[str, int]:
        """Return the bytes of this rank's devices by kind, without kinds that cannot be read.

        Called outside the training thread.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the loaders, the checkpoint writer and the engine's resources. Safe after an error."""

    @property
    def progress(self) -> RunProgress:
        return self.state.progress

    @cached_property
    def steps_per_epoch(self) -> float:
        return schedules.steps_per_epoch(self.config.train, self.training_images)

    @cached_property
    def steps(self) -> int:
        """Number of steps that the document asks for."""
        return schedules.total_steps(self.config.train, self.training_images)

    @cached_property
    def _snapshot_steps(self) -> set[int]:
        """Steps whose checkpoints are kept for good (`checkpoint.snapshots`)."""
        return schedules.snapshot_steps(self.config.checkpoint.snapshots, self.config.train, self.training_images)

    @cached_property
    def learning_rates(self) -> npt.NDArray[np.float64]:
        """Learning rate of every step, for the log: float64 [steps]."""
        return schedules.hyperparameters_at(self.config.train, np.arange(self.steps), self.steps_per_epoch)[:, 0]

    def log_start(self, resumed: bool) -> None:
        """Log the start of the training and add the gauges."""
        flops = self.spec.training_flops(self.config.input.image_size)
        self.training_logger.add_gauges(
            Gauges(self.config, self.world, self.loader, flops, self.steps_between_saves, self.device_memory)
        )
        self.training_logger.started(
            resumed=resumed,
            step=self.progress.step,
            total_steps=self.end_step,
            ranks=self.world.size,
            global_batch=self.config.train.global_batch,
            steps_per_epoch=round(self.steps_per_epoch, 3),
            device=self.world.device_name,
            train_images=self.training_images,
            validation_images=self.evaluator.count,
            parameters=self.spec.num_parameters,
            training_flops_per_image=flops,
            **({"origin": self.progress.origin} if self.progress.origin else {}),
            optimizer_bytes=self.state.optimizer_bytes,
        )

    def log_image_size(self, image_size: int) -> None:
        """Set the training FLOPs per image when the side of the training images changes."""
        if image_size != self._image_size:
            self._image_size = image_size
            self.training_logger.set_flops_per_image(self.spec.training_flops(image_size))

    def apply_status(self, statuses: list[StepStatus]) -> bool:
        """Apply agreed step statuses. Returns True if all ranks are to stop now.

        Every rank gets the same statuses after the same step, so every rank decides the same. Raises PodscaleError
        after more than `train.max_nonfinite` non-finite steps in a row.
        """
        progress, limit = self.progress, self.config.train.max_nonfinite
        for status in statuses:
            progress.skipped += not status.is_finite
            progress.skipped_in_a_row = 0 if status.is_finite else progress.skipped_in_a_row + 1
            self.training_logger.log_status(
                status,
                epoch=status.step / self.steps_per_epoch,
                learning_rate=float(self.learning_rates[status.step - 1]),
            )
            if progress.skipped_in_a_row > limit:
                raise PodscaleError(
                    f"{progress.skipped_in_a_row} steps in a row (up to step {status.step}) {NONFINITE_MESSAGE}",
                    field="train.max_nonfinite",
                    got=limit,
                    hint="They were masked, so the weights are those from before. Lower train.schedule.learning_rate, "
                    "lengthen the warm-up, or look at the data.",
                )
            self.stop_agreed = self.stop_agreed or status.stop_requested
        return self.stop_agreed

    @property
    def target_reached(self) -> bool:
        """True if the evaluation of this state reached `train.target_top1`; the same on all ranks."""
        target, top1 = self.config.train.target_top1, self.progress.top1
        return target is not None and top1 is not None and top1 >= target

    @property
    def keeps_ema(self) -> bool:
        """True if a running average (EMA) of the weights is kept beside the trained ones."""
        return self.config.train.ema.decay is not None

    @property
    def model_is_ema(self) -> bool:
        """True if the final model is the running average."""
        return self.config.evaluate.weights == "ema"

    @property
    def end_step(self) -> int:
        """Last step of the run: the document's number of steps, or the current step once the target is reached."""
        return self.progress.step if self.target_reached else self.steps

    def evaluates_after(self, step: int) -> bool:
        """Return True if the document asks for an evaluation after this step."""
        every = self.config.evaluate.every_epochs * self.steps_per_epoch
        return step == self.steps or schedules.completes_period(step, every)

    def saves_after(self, step: int) -> bool:
        """Return True if the document asks for a checkpoint after this step."""
        settings = self.config.checkpoint
        by_steps = settings.every_steps > 0 and step % settings.every_steps == 0
        by_epochs = schedules.completes_period(step, settings.every_epochs * self.steps_per_epoch)
        return step == self.end_step or step in self._snapshot_steps or by_steps or by_epochs

    def is_due_after(self, step: int) -> bool:
        """Return True if an evaluation or a checkpoint follows this step."""
        return self.evaluates_after(step) or self.saves_after(step)

    def is_evaluation_due(self) -> bool:
        """Return True if this state is due for an evaluation that has not run, as after a stop request."""
        return self.progress.evaluated != self.progress.step and self.evaluates_after(self.progress.step)

    def evaluate(self) -> None:
        """Evaluate the validation split and store the result in the progress. Gives up on a stop request."""
        progress = self.progress
        if self.apply_status(self.step_sync.drain()):
            return
        self.training_logger.evaluation_started(progress.step)
        with self.training_logger.phase("evaluation"):
            result = self.evaluate_weights(averaged=self.model_is_ema)
            other_result = (
                self.evaluate_weights(averaged=not self.model_is_ema) if result is not None and self.keeps_ema else None
            )
        if result is None or (self.keeps_ema and other_result is None):
            self.stop_agreed = True
            return
        progress.evaluated = progress.step
        progress.evaluation = {"top1": result.top1, "top5": result.top5, "loss": result.loss}
        epoch = progress.step / self.steps_per_epoch
        if other_result is not None:
            self.training_logger.evaluated_other_weights(
                progress.step, "trained" if self.model_is_ema else "ema", other_result, epoch=epoch
            )
        self.training_logger.evaluated(progress.step, result, epoch=epoch, target_reached=self.target_reached)

    @property
    def steps_between_saves(self) -> float:
        """Steps between two checkpoints by the document; 0 if it asks for none before the end."""
        settings = self.config.checkpoint
        return min(filter(None, (settings.every_steps, settings.every_epochs * self.steps_per_epoch)), default=0.0)

    def run_due_actions(self) -> None:
        """Run what is due after a step: evaluation, checkpoint. Raises Preempted after a stop, with the state saved."""
        if not self.stop_agreed and self.is_evaluation_due():
            self.evaluate()
        if self.stop_agreed:
            self.save(wait=True)
            raise Preempted(
                f"stopped on request after step {self.progress.step} of {self.steps}, the state is saved",
                hint="The same command continues.",
            )
        if self.saves_after(self.progress.step):
            self.save()

    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint from rank 0.

        Args:
            wait: return on every rank only when the checkpoint is on disk.
        """
        with self.training_logger.phase("checkpoint"):
            self.apply_status(self.step_sync.drain())  # the state includes the status of every step so far
            snapshot = self.capture_state()
            if snapshot is not None:
                snapshot.meta[EPOCH_KEY] = round(self.progress.step / self.steps_per_epoch, 6)
                self.checkpoint_store.save(snapshot, top1=self.progress.top1)
                if wait:
                    self.checkpoint_store.wait()
            if wait:
                self.barrier()

    def finish(self) -> None:
        """Wait for the last checkpoint and write the final model."""
        self.apply_status(self.step_sync.drain())
        arrays = self.model_arrays(averaged=self.model_is_ema)
        other = self.model_arrays(averaged=not self.model_is_ema) if self.keeps_ema else None
        if self.world.is_rank0:
            self.checkpoint_store.wait()
            export_model(arrays, TrainedModel(self.config, self.classes, self.progress), self.model_directory, other)
        self.barrier()
        self.training_logger.finished(
            self.progress.step, skipped_updates=self.progress.skipped, **self.progress.evaluation
        )


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Args:
        steps: steps done, masked ones included.
        skipped: masked (non-finite) steps.
        evaluation: top1, top5 and loss of the last evaluation.
    """

    steps: int
    skipped: int
    evaluation: dict[str, float]


def train(trainer: Trainer) -> TrainResult:
    """Train from the newest checkpoint, or from the start, to the end of the run. Every rank calls it.

    Raises:
        Preempted: after a stop request, once the state is saved.
        InputError: the checkpoints belong to another run.
        PodscaleError: too many non-finite steps in a row.
    """
    trainer.training_logger.restore_started()
    resumed = trainer.restore()
    trainer.log_start(resumed)
    if resumed and trainer.is_evaluation_due():
        trainer.run_due_actions()  # the previous launch was stopped before it had evaluated this state

    for statuses in trainer.train_steps():
        trainer.apply_status(statuses)
        trainer.run_due_actions()
        if trainer.target_reached:
            break

    trainer.finish()
    progress = trainer.progress
    return TrainResult(progress.step, progress.skipped, progress.evaluation)
