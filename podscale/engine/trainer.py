"""Training: one loop over the updates of a run. What stands behind its names is put together in an engine's `build`."""

from dataclasses import dataclass

from podscale.engine.session import Trainer


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
