"""What a rank does in a stage, whichever engine it runs: which stage it is, and a training from beginning to end."""

from collections.abc import Callable

from podscale.checkpoint import Checkpoints
from podscale.engine.checkpoints import open_checkpoints
from podscale.engine.monitor import Monitor, monitoring
from podscale.engine.notes import Whereabouts
from podscale.engine.place import Place
from podscale.engine.session import Session
from podscale.engine.trainer import TrainResult, train
from podscale.engine.world import World
from podscale.errors import InputError, Preempted
from podscale.rundir import RunDirectory
from podscale.shards.shardset import ShardSet

Build = Callable[[Checkpoints, Monitor], Session]
"""An engine's session, of what this rank saves and tells."""


def carry_out(
    place: Place, whereabouts: Whereabouts, training: Callable[[], object], evaluation: Callable[[], object]
) -> None:
    """Carries out the stage that the place names. Raises InputError for one that engines do not have."""
    match place.stage:
        case "train":
            training()
        case "evaluate":
            whereabouts.enter("evaluation")
            evaluation()
        case _:
            raise InputError("this engine has the stages train and evaluate", field="PODSCALE_STAGE", got=place.stage)


def train_run(
    place: Place, world: World, shard_set: ShardSet, run: RunDirectory, whereabouts: Whereabouts, build: Build
) -> TrainResult:
    """Trains; checkpoints and the final model go to the run directory."""
    config, may_write = place.config, place.fence_of(run)
    with monitoring(config, world, run, place.rank_directory, may_write, whereabouts) as monitor:
        session = build(open_checkpoints(config, run, shard_set, may_write, monitor.checkpoint), monitor)
        try:
            return train(session)
        except Preempted:
            monitor.preempted(session.progress.step)
            raise
        finally:
            session.close()
