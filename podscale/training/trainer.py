"""Training loop of one rank: train steps, evaluate, save checkpoints, stop.

An engine implements `Trainer`'s abstract methods in its own `trainer` module.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy.typing as npt

from podscale import models
from podscale.config import RunConfig
from podscale.config.batch_phases import BatchPhase
from podscale.data.loaders.base import Loader
from podscale.data.shard_set import ShardSet
from podscale.distributed.rank_group import World
from podscale.distributed.step_status import StepStatus, StepSync, StopRequest
from podscale.errors import PodscaleError, Preempted
from podscale.runs import RunDirectory
from podscale.runs.checkpoint import CheckpointStore, Snapshot
from podscale.training.fine_tuning import trained_spec
from podscale.training.gauges import add_gauges
from podscale.training.initial_weights import EPOCH_BEFORE_KEY, EPOCH_KEY
from podscale.training.model_weights import TrainedModel, export_model
from podscale.training.run_progress import EvaluationResult, RunProgress
from podscale.training.step_plan import StepPlan
from podscale.training.training_logger import TrainingLogger

NONFINITE_MESSAGE = "had a loss or gradient that is not finite"
"""Error text for a non-finite loss or gradient."""


class TrainState(Protocol):
    """Training state that a checkpoint holds, equal on all ranks."""

    @property
    def progress(self) -> RunProgress: ...

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state and fp32 master weights on this rank, without the model's own weights."""
        ...


class Evaluator(Protocol):
    """Evaluator of a model over the validation split."""

    count: int
    """Images of the split."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Args:
        steps: number of steps, including the skipped ones.
        skipped: number of steps that changed no weights, because a loss or gradient was not finite.
        evaluation: scores of the last evaluation, by name.
    """

    steps: int
    skipped: int
    evaluation: dict[str, float]


@dataclass(kw_only=True)
class Trainer(ABC):
    """One rank of a training run.

    This class decides when to evaluate, save and stop, the same on all ranks. A subclass in an engine computes.
    """

    config: RunConfig
    shard_set: ShardSet
    world: World
    state: TrainState
    loader: Loader
    evaluator: Evaluator
    step_sync: StepSync
    stop_request: StopRequest
    training_logger: TrainingLogger
    checkpoint_store: CheckpointStore
    batch_phase: BatchPhase | None = None
    """Part of the run that the trainer is prepared for; None before the first step."""
    stop_agreed: bool = False
    """All ranks have agreed to stop."""

    def train(self) -> TrainResult:
        """Train from the newest checkpoint, or from the start, to the end of the run. Every rank calls it.

        Raises:
            Preempted: after a stop request, once the state is saved.
            InputError: the checkpoints belong to another run.
            PodscaleError: too many non-finite steps in a row.
        """
        self.restore_or_start()
        for batch in self.batches():
            self.apply_status(self.train_step(batch))  # statuses of earlier steps, equal on all ranks
            self.run_due_actions()  # evaluate, save, stop
            if self.target_reached:
                break
        return self.finish()

    @abstractmethod
    def restore(self) -> bool:
        """Restore the newest complete checkpoint on every rank. Returns False if there is none.

        Raises InputError on every rank if the checkpoints conflict with the run.
        """

    @abstractmethod
    def batches_of_phase(self, stop: int) -> Iterator[Any]:
        """Yield this rank's batches on its devices, from the current step to `stop`, all of one global batch.

        A batch is what one call of `train_step` trains on: the images of one step in PyTorch, the images of several
        steps in JAX. A batch never continues past a step for which `StepPlan.is_due_after` is true, because
        evaluations and saves happen only between batches.
        """

    @abstractmethod
    def set_batch_phase(self, phase: BatchPhase) -> None:
        """Prepare for steps of this batch and accumulation. All ranks call it between the same two steps."""

    @abstractmethod
    def train_step(self, batch: Any) -> list[StepStatus]:
        """Train on a batch and advance the progress.

        Returns the agreed statuses that have arrived since the last call, oldest first (see `StepSync.ready`).
        """

    @abstractmethod
    def evaluate_weights(self, *, averaged: bool) -> EvaluationResult | None:
        """Evaluate the weights or, if `averaged`, their running average. All ranks return the same result.

        Returns None if any rank was asked to stop.
        """

    @abstractmethod
    def capture_state(self) -> Snapshot | None:
        """Return a copy of the state in rank 0's host memory, None on other ranks. All ranks call it.

        Training may continue while the copy is written.
        """

    @abstractmethod
    def model_arrays(self, *, averaged: bool) -> dict[str, npt.NDArray[Any]]:
        """Return the fp32 weights (or their running averages) and buffers, by the names in `spec`.

        All ranks call it; only rank 0's result is used.
        """

    @abstractmethod
    def device_memory(self) -> dict[str, int]:
        """Return the memory of this rank's devices, bytes by kind, as far as known. Called on other threads too."""

    def close(self) -> None:
        """Close the loaders, the checkpoint writer and the engine's resources. Safe after an error."""
        self.loader.close()
        self.evaluator.close()
        self.checkpoint_store.close()

    @property
    def progress(self) -> RunProgress:
        return self.state.progress

    @cached_property
    def plan(self) -> StepPlan:
        return StepPlan(self.config, len(self.shard_set.split("train")))

    @cached_property
    def spec(self) -> models.ModelSpec:
        return trained_spec(self.config, len(self.shard_set.classes))

    @property
    def target_reached(self) -> bool:
        """True if the evaluation of this state reached `train.target_top1`; the same on all ranks."""
        target, top1 = self.config.train.target_top1, self.progress.top1
        return target is not None and top1 is not None and top1 >= target

    @property
    def end_step(self) -> int:
        """Last step of the run: the document's number of steps, or the current step once the target is reached."""
        return self.progress.step if self.target_reached else self.plan.steps

    @property
    def evaluation_due(self) -> bool:
        """True if this step's evaluation is due and has not run, for example after a stop request."""
        return self.progress.evaluated != self.progress.step and self.plan.evaluates_after(self.progress.step)

    @property
    def average_flags(self) -> list[bool]:
        """Values of `averaged` to evaluate: that of `evaluate.weights` first, then the other if an average is kept."""
        is_average = self.config.evaluate.weights == "ema"
        return [is_average, not is_average] if self.config.train.ema.decay is not None else [is_average]

    def batches(self) -> Iterator[Any]:
        """Yield this rank's batches from the current step to `end_step`, prepared for each global batch in turn."""
        while self.progress.step < self.end_step:
            self._enter_batch_phase(self.progress.step)
            yield from self.batches_of_phase(min(self.plan.end_of_batch(self.progress.step), self.end_step))

    def _enter_batch_phase(self, step: int) -> None:
        """Prepare for the batch of the step after `step`, if that is another one, and log the change."""
        before, self.batch_phase = self.batch_phase, self.plan.batch_phase_after(step)
        if self.batch_phase == before:
            return
        self.set_batch_phase(self.batch_phase)
        if before is not None:
            self.training_logger.batch_changed(step, self.batch_phase, epoch=self.plan.epoch_after(step))

    def restore_or_start(self) -> None:
        """Restore the newest checkpoint, if there is one, and log the start."""
        self.training_logger.restore_started()
        resumed = self.restore()
        self.log_start(resumed)
        if resumed and self.evaluation_due:
            self.run_due_actions()  # the previous launch was stopped before it evaluated this state

    def log_start(self, resumed: bool) -> None:
        """Log the start of the training and add the gauges."""
        logger, plan, flops = self.training_logger, self.plan, self.spec.training_flops(self.config.input.image_size)
        step, batch = self.progress.step, plan.batch_phase_after(self.progress.step).global_batch
        add_gauges(logger.metrics, plan, self.world, self.loader, flops, self.device_memory)
        logger.started(
            resumed=resumed,
            step=step,
            total_steps=self.end_step,
            ranks=self.world.size,
            global_batch=batch,
            images_left=plan.images_left_after,
            steps_per_epoch=round(plan.training_images / batch, 3),
            epoch=round(plan.epoch_after(step), 6),
            total_epochs=round(plan.epoch_after(self.end_step), 6),
            device=self.world.device_name,
            train_images=plan.training_images,
            validation_images=self.evaluator.count,
            parameters=self.spec.num_parameters,
            training_flops_per_image=flops,
            **({"origin": self.progress.origin} if self.progress.origin else {}),
            optimizer_bytes=self.state.optimizer_bytes,
        )
        if self.progress.origin and not resumed:
            logger.log_event("initial_weights", **self.progress.origin)

    def apply_status(self, statuses: list[StepStatus]) -> bool:
        """Count and log agreed step statuses. Returns True if all ranks must stop now.

        Every rank gets the same statuses after the same step, so every rank decides the same. Raises PodscaleError
        after more than `train.max_nonfinite` non-finite steps in a row.
        """
        progress, limit = self.progress, self.config.train.max_nonfinite
        for status in statuses:
            progress.skipped += not status.is_finite
            progress.skipped_in_a_row = 0 if status.is_finite else progress.skipped_in_a_row + 1
            self.training_logger.log_status(
                status,
                epoch=self.plan.epoch_after(status.step),
                learning_rate=float(self.plan.learning_rates[status.step - 1]),
            )
            if progress.skipped_in_a_row > limit:
                raise PodscaleError(
                    f"{progress.skipped_in_a_row} steps in a row (up to step {status.step}) {NONFINITE_MESSAGE}",
                    field="train.max_nonfinite",
                    got=limit,
                    hint="They were masked and changed no weights. Lower train.schedule.learning_rate, lengthen the "
                    "warm-up, or check the data.",
                )
            self.stop_agreed = self.stop_agreed or status.stop_requested
        return self.stop_agreed

    def run_due_actions(self) -> None:
        """Run what is due after a step: evaluation, checkpoint. Raises Preempted after a stop, with the state saved."""
        if not self.stop_agreed and self.evaluation_due:
            self.evaluate()
        if self.stop_agreed:
            self.save(wait=True)
            raise Preempted(
                f"stopped on request after step {self.progress.step} of {self.plan.steps}, the state is saved",
                hint="Run the same command to continue.",
            )
        if self.target_reached or self.plan.saves_after(self.progress.step):
            self.save()

    def evaluate(self) -> None:
        """Evaluate the validation split and store the result in the progress. Stops early on a stop request."""
        progress, logger = self.progress, self.training_logger
        if self.apply_status(self.step_sync.drain()):
            return
        logger.evaluation_started(progress.step)
        results: list[EvaluationResult] = []
        with logger.timer.phase("evaluation"):
            for averaged in self.average_flags:
                result = self.evaluate_weights(averaged=averaged)
                if result is None:
                    self.stop_agreed = True
                    return
                results.append(result)
        model_result, *other_results = results
        progress.evaluated = progress.step
        progress.evaluation = model_result.scores
        epoch = self.plan.epoch_after(progress.step)
        for result in other_results:
            other_weights = "trained" if self.config.evaluate.weights == "ema" else "ema"
            logger.evaluated_other_weights(progress.step, other_weights, result, epoch=epoch)
        logger.evaluated(progress.step, model_result, epoch=epoch, target_reached=self.target_reached)

    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint from rank 0; with `wait`, return on every rank only when it is on disk."""
        with self.training_logger.timer.phase("checkpoint"):
            self.apply_status(self.step_sync.drain())  # so that the saved count of skipped steps is complete
            snapshot = self.capture_state()
            if snapshot is not None:
                for key, step in ((EPOCH_BEFORE_KEY, self.progress.step - 1), (EPOCH_KEY, self.progress.step)):
                    snapshot.meta[key] = round(self.plan.epoch_after(step), 6)
                self.checkpoint_store.save(snapshot, top1=self.progress.top1)
                if wait:
                    self.checkpoint_store.wait()
            if wait:
                self.world.barrier()

    def finish(self) -> TrainResult:
        """Wait for the last checkpoint, write the final model and return the result."""
        progress = self.progress
        self.apply_status(self.step_sync.drain())
        arrays, *other_arrays = [self.model_arrays(averaged=averaged) for averaged in self.average_flags]
        if self.world.is_rank0:
            self.checkpoint_store.wait()
            trained = TrainedModel(self.config, self.shard_set.classes, progress)
            export_model(arrays, trained, RunDirectory.for_config(self.config).model, *other_arrays)
        self.world.barrier()
        self.training_logger.finished(progress.step, skipped_updates=progress.skipped, **progress.evaluation)
        return TrainResult(progress.step, progress.skipped, progress.evaluation)
