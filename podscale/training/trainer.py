"""Training: one loop over the updates of a run. What stands behind its names is put together in an engine's `build`.

What one rank of a training does between updates: agree, evaluate, save, end. What computes is the engine's.
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
"""What the error of a training says whose weights or loss left the numbers."""


class TrainState(Protocol):
    """Everything that a resumed run needs, equal on all ranks."""

    @property
    def progress(self) -> RunProgress: ...

    @property
    def optimizer_bytes(self) -> int:
        """What this rank keeps for its updates beside the weights that the model computes with."""
        ...


class Evaluator(Protocol):
    """Measures a model over the validation split of `count` images."""

    count: int


@dataclass(kw_only=True)
class Trainer(ABC):
    """One rank of one training: what it decides, the same on all ranks, and what it asks of an engine to do."""

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
    """What the run begins with where it has no checkpoint of its own; rank 0 asks."""
    training_images: int
    stop_agreed: bool = False
    """All ranks have agreed to stop."""
    _image_size: int = field(default=0, init=False)
    """Of the newest training images, in pixels; 0 before the first."""

    @abstractmethod
    def restore(self) -> bool:
        """Continues from the newest whole checkpoint, on every rank; whether there was one.

        Raises InputError on every rank where the checkpoints conflict with the run.
        """

    @abstractmethod
    def train_steps(self) -> Iterator[list[StepStatus]]:
        """Carries out updates up to the end of the run, and yields after each, or after several of them.

        What it yields are the words that are due. Never are several carried out over a step at which something
        `interrupts`.
        """

    @abstractmethod
    def evaluate_weights(self, *, averaged: bool) -> EvaluationResult | None:
        """Evaluates the state as it is, the same on all ranks; None where any rank was asked to stop meanwhile.

        averaged: the running average of the weights in their place, where the document has one kept.
        """

    @abstractmethod
    def capture_state(self) -> Snapshot | None:
        """A copy of the state in memory of rank 0, after which training may go on; all ranks call it."""

    @abstractmethod
    def model_arrays(self, *, averaged: bool) -> dict[str, npt.NDArray[Any]]:
        """The fp32 weights and buffers by the catalogue's names, on rank 0; all ranks call it.

        averaged: as in `measure`.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has come here."""

    @abstractmethod
    def device_memory(self) -> dict[str, int]:
        """Bytes of this rank's devices by kind; what cannot be read is left out. Called off the training thread."""

    @abstractmethod
    def close(self) -> None:
        """Ends loaders, the writer and what else the engine keeps; safe after an error."""

    @property
    def progress(self) -> RunProgress:
        return self.state.progress

    @cached_property
    def steps_per_epoch(self) -> float:
        return schedules.steps_per_epoch(self.config.train, self.training_images)

    @cached_property
    def steps(self) -> int:
        """The updates that the document asks for."""
        return schedules.total_steps(self.config.train, self.training_images)

    @cached_property
    def _snapshot_steps(self) -> set[int]:
        """After how many updates a checkpoint is kept for good."""
        return schedules.snapshot_steps(self.config.checkpoint.snapshots, self.config.train, self.training_images)

    @cached_property
    def learning_rates(self) -> npt.NDArray[np.float64]:
        """The learning rate of every update, for the log."""
        return schedules.hyperparameters_at(self.config.train, np.arange(self.steps), self.steps_per_epoch)[:, 0]

    def log_start(self, resumed: bool) -> None:
        """Reports the beginning."""
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
        """Tells the monitor what images cost that have another side than those before."""
        if image_size != self._image_size:
            self._image_size = image_size
            self.training_logger.set_flops_per_image(self.spec.training_flops(image_size))

    def apply_status(self, statuses: list[StepStatus]) -> bool:
        """Acts on agreed words; whether all ranks are to stop now. Raises after too many non-finite updates in a row.

        Every rank gets the same words after the same update, so every rank does the same.
        """
        progress, limit = self.progress, self.config.train.max_nonfinite
        for word in statuses:
            progress.skipped += not word.is_finite
            progress.skipped_in_a_row = 0 if word.is_finite else progress.skipped_in_a_row + 1
            self.training_logger.log_status(
                word,
                epoch=word.step / self.steps_per_epoch,
                learning_rate=float(self.learning_rates[word.step - 1]),
            )
            if progress.skipped_in_a_row > limit:
                raise PodscaleError(
                    f"{progress.skipped_in_a_row} steps in a row (up to step {word.step}) {NONFINITE_MESSAGE}",
                    field="train.max_nonfinite",
                    got=limit,
                    hint="They were masked, so the weights are those from before. Lower train.schedule.learning_rate, "
                    "lengthen the warm-up, or look at the data.",
                )
            self.stop_agreed = self.stop_agreed or word.stop_requested
        return self.stop_agreed

    @property
    def target_reached(self) -> bool:
        """Whether the state, as it is, was measured to be as good as the document asks; the same on all ranks."""
        target, top1 = self.config.train.target_top1, self.progress.top1
        return target is not None and top1 is not None and top1 >= target

    @property
    def keeps_ema(self) -> bool:
        """Whether a running average of the weights is kept beside those that are trained."""
        return self.config.train.ema.decay is not None

    @property
    def model_is_ema(self) -> bool:
        """Whether that average is the model."""
        return self.config.evaluate.weights == "ema"

    @property
    def end_step(self) -> int:
        """The updates of the whole run, as far as is known: those of the document, or those that were enough."""
        return self.progress.step if self.target_reached else self.steps

    def evaluates_after(self, step: int) -> bool:
        """Whether the document asks for an evaluation after so many updates."""
        every = self.config.evaluate.every_epochs * self.steps_per_epoch
        return step == self.steps or schedules.completes_period(step, every)

    def saves_after(self, step: int) -> bool:
        """Whether the document asks for a checkpoint after so many updates."""
        settings = self.config.checkpoint
        by_steps = settings.every_steps > 0 and step % settings.every_steps == 0
        by_epochs = schedules.completes_period(step, settings.every_epochs * self.steps_per_epoch)
        return step == self.end_step or step in self._snapshot_steps or by_steps or by_epochs

    def is_due_after(self, step: int) -> bool:
        """Whether something other than an update is to follow so many of them."""
        return self.evaluates_after(step) or self.saves_after(step)

    def is_evaluation_due(self) -> bool:
        """Whether the state is to be measured and was not yet, which a stop may have prevented before."""
        return self.progress.evaluated != self.progress.step and self.evaluates_after(self.progress.step)

    def evaluate(self) -> None:
        """Measures accuracy over the validation split and keeps it in the progress; gives up when asked to stop."""
        progress = self.progress
        if self.apply_status(self.step_sync.drain()):
            return
        self.training_logger.evaluation_started(progress.step)
        with self.training_logger.phase("evaluation"):
            found = self.evaluate_weights(averaged=self.model_is_ema)
            beside = (
                self.evaluate_weights(averaged=not self.model_is_ema) if found is not None and self.keeps_ema else None
            )
        if found is None or (self.keeps_ema and beside is None):
            self.stop_agreed = True
            return
        progress.evaluated = progress.step
        progress.evaluation = {"top1": found.top1, "top5": found.top5, "loss": found.loss}
        epoch = progress.step / self.steps_per_epoch
        if beside is not None:
            self.training_logger.evaluated_other_weights(
                progress.step, "trained" if self.model_is_ema else "ema", beside, epoch=epoch
            )
        self.training_logger.evaluated(progress.step, found, epoch=epoch, target_reached=self.target_reached)

    @property
    def steps_between_saves(self) -> float:
        """Updates between two checkpoints, by the document; 0 where it asks for none before the end."""
        settings = self.config.checkpoint
        return min(filter(None, (settings.every_steps, settings.every_epochs * self.steps_per_epoch)), default=0.0)

    def run_due_actions(self) -> None:
        """What is due between two updates. Raises Preempted where all ranks are to stop, once the state is saved."""
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
        """Hands a copy of the state to the writer, on rank 0; with `wait` every rank returns once it is on disk."""
        with self.training_logger.phase("checkpoint"):
            self.apply_status(self.step_sync.drain())  # what is known of every update so far belongs to the state
            snapshot = self.capture_state()
            if snapshot is not None:
                snapshot.meta[EPOCH_KEY] = round(self.progress.step / self.steps_per_epoch, 6)
                self.checkpoint_store.save(snapshot, top1=self.progress.top1)
                if wait:
                    self.checkpoint_store.wait()
            if wait:
                self.barrier()

    def finish(self) -> None:
        """Waits for the last checkpoint and writes the final model."""
        self.apply_status(self.step_sync.drain())
        arrays = self.model_arrays(averaged=self.model_is_ema)
        beside = self.model_arrays(averaged=not self.model_is_ema) if self.keeps_ema else None
        if self.world.is_rank0:
            self.checkpoint_store.wait()
            export_model(arrays, TrainedModel(self.config, self.classes, self.progress), self.model_directory, beside)
        self.barrier()
        self.training_logger.finished(
            self.progress.step, skipped_updates=self.progress.skipped, **self.progress.evaluation
        )


@dataclass(frozen=True)
class TrainResult:
    """How a training ended: updates done, masked ones among them, and what the last evaluation found."""

    steps: int
    skipped: int
    evaluation: dict[str, float]


def train(trainer: Trainer) -> TrainResult:
    """Trains from the newest checkpoint, or from the start, to the end of the run; every rank calls it.

    Raises Preempted after a stop request, once the state is saved; InputError where the checkpoints belong to another
    run; PodscaleError after too many non-finite updates in a row.
    """
    trainer.training_logger.restore_started()
    resumed = trainer.restore()
    trainer.log_start(resumed)
    if resumed and trainer.is_evaluation_due():
        trainer.run_due_actions()  # the former launch was asked to stop before it had measured this state

    for words in trainer.train_steps():
        trainer.apply_status(words)
        trainer.run_due_actions()
        if trainer.target_reached:
            break

    trainer.finish()
    progress = trainer.progress
    return TrainResult(progress.step, progress.skipped, progress.evaluation)
