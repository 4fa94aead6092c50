"""What a process of this engine does in each stage, once it knows its world."""

from collections.abc import Callable

from podscale import models
from podscale.checkpoint import Checkpoints
from podscale.checkpoint.modelfile import WEIGHTS
from podscale.engine.monitor import Monitor
from podscale.engine.notes import Whereabouts
from podscale.engine.phase import untimed
from podscale.engine.place import Place
from podscale.engine.prediction import Predict, predict_all
from podscale.engine.stage import train_run
from podscale.engine.stop import StopRequest
from podscale.engine.trainer import TrainResult
from podscale.ensemble import evaluated_together
from podscale.errors import InputError
from podscale.input import Loader
from podscale.jax.build import build_evaluator, build_session
from podscale.jax.compilation import keep_programs
from podscale.jax.mesh import mesh_of
from podscale.jax.modelfile import load_weights
from podscale.jax.placing import replicate
from podscale.jax.session import Session
from podscale.jax.step import build_layout
from podscale.jax.world import World
from podscale.rundir import RunDirectory, programs_directory
from podscale.shards.shardset import ShardSet


def run_training(
    place: Place, world: World, shard_set: ShardSet, run: RunDirectory, stop: StopRequest, whereabouts: Whereabouts
) -> TrainResult:
    """Trains; checkpoints and the final model go to the run directory."""
    keep_programs(programs_directory(place.config.run.workspace))

    def build(checkpoints: Checkpoints, monitor: Monitor) -> Session:
        return build_session(place.config, world, shard_set, run.model, checkpoints, monitor, stop)

    return train_run(place, world, shard_set, run, whereabouts, build)


def run_evaluation(place: Place, world: World, shard_set: ShardSet, run: RunDirectory) -> None:
    """Evaluates the final model; process 0 writes the predictions of every sample to the run directory."""
    config = place.config
    if evaluated_together(config):
        raise InputError(
            "the JAX engine evaluates one model, and this document has several evaluated together",
            field="train.engine",
            got="jax",
            hint="Set train.engine=pytorch for the evaluation: models do not depend on the engine that trained them.",
        )
    keep_programs(programs_directory(config.run.workspace))
    mesh = mesh_of(config, world.devices)
    spec = models.spec(config.model, len(shard_set.classes))
    parameters, statistics = load_weights(spec, run.model / WEIGHTS)
    layout = build_layout(config, mesh, spec)
    buckets, statistics = replicate((layout.lay_out(parameters), statistics), mesh)

    def prepare(counted: Callable[[int], None]) -> tuple[Loader, Predict]:
        loader, evaluator = build_evaluator(config, world, mesh, layout, shard_set, counted)
        return loader, lambda: evaluator.predict(buckets, statistics, untimed)

    predict_all(place, world, run, prepare, lambda: world.barrier("the evaluation"))
