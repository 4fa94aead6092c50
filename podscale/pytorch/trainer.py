"""Training: one loop over the updates of a run. What stands behind its names is put together in `build`."""

from dataclasses import dataclass

from podscale.pytorch.checkpoints import restore_or_start
from podscale.pytorch.session import Session


@dataclass(frozen=True)
class TrainResult:
    """How a training ended: updates done, masked ones among them, and what the last evaluation found."""

    steps: int
    skipped: int
    evaluation: dict[str, float]


def train(session: Session) -> TrainResult:
    """Trains from the newest checkpoint, or from the start, to the end of the run; every rank calls it.

    Raises Preempted after a stop request, once the state is saved; InputError where the checkpoints belong to another
    run; PodscaleError after too many non-finite updates in a row.
    """
    monitor, control, progress = session.monitor, session.control, session.state.progress
    monitor.restoring()
    resumed = restore_or_start(session.checkpoints, session.config.checkpoint.resume, session.state, session.world)
    session.step.seek(progress.step)
    session.started(resumed)
    if resumed and session.evaluation_due():
        session.settle()  # the former launch was asked to stop before it had measured this state

    batches = session.loader.batches(progress.step, session.end)
    for batch in session.feed(batches, monitor.phase):
        result = session.step(batch, monitor.phase)
        progress.step += 1
        control.send(progress.step, result, busy=monitor.busy, stop=session.stop.requested)
        monitor.updated(progress.step, len(batch.labels), session.loader.bad_records)

        session.heed(control.due())
        session.settle()
        if session.target_reached:
            break

    session.finish()
    return TrainResult(progress.step, progress.skipped, progress.evaluation)
