"""The process of one rank: `python -m podscale.pytorch.rank`, started under the supervisor.

Reads the run document and its place from the environment (see `Place`), makes sure that all ranks are about to do the
same, and carries out one stage. How it ended is recorded by launch.rankprocess, in whose process this runs.
"""

import logging
import os
from collections.abc import Callable

import torch

from podscale.checkpoint import Checkpoints
from podscale.checkpoint.modelfile import WEIGHTS
from podscale.engine.meeting import Meeting
from podscale.engine.monitor import Monitor
from podscale.engine.notes import Whereabouts
from podscale.engine.phase import untimed
from podscale.engine.place import Place
from podscale.engine.prediction import Predict, predict_all
from podscale.engine.stage import carry_out, train_run
from podscale.engine.start import agreed_shard_set
from podscale.engine.stop import StopRequest
from podscale.ensemble import evaluated_together
from podscale.errors import Preempted
from podscale.input import Loader
from podscale.pytorch import world as worlds
from podscale.pytorch.allreduce.auto import settle_all_reduce
from podscale.pytorch.build import build_evaluator, build_placed_model, build_session
from podscale.pytorch.failure import watched
from podscale.pytorch.feed import Feed
from podscale.pytorch.libraries import library_facts
from podscale.pytorch.meeting import meet
from podscale.pytorch.modelfile import load_weights
from podscale.pytorch.precision import build_precision, set_numerics
from podscale.pytorch.session import Session
from podscale.pytorch.together import evaluate_together
from podscale.pytorch.world import World
from podscale.rundir import RunDirectory
from podscale.shards.shardset import ShardSet


def main() -> None:
    """Carries out the stage of the environment."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    place = Place.of()
    meeting = meet(place.config.launch.timeout_seconds)
    try:
        stacks = RunDirectory.of(place.config).hang
        with watched(meeting, place.end, hang_seconds=place.config.launch.hang_seconds, stacks=stacks) as whereabouts:
            run_stage(place, meeting, whereabouts)
    except Preempted:
        worlds.leave(meeting)
        raise
    worlds.leave(meeting)


def run_stage(place: Place, meeting: Meeting, whereabouts: Whereabouts) -> None:
    """Opens the shard set, joins the others and carries out the stage.

    A stop request ends an evaluation at once (rankprocess has the handler), since it has nothing to save.
    """
    stop = StopRequest()
    if place.stage == "train":
        stop.install()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shard_set = agreed_shard_set(place, meeting, device=device, libraries=library_facts())
    world = worlds.join(meeting.timeout_seconds, meeting=meeting)
    run = RunDirectory.of(place.config)
    evaluate = evaluate_together if evaluated_together(place.config) else run_evaluation
    carry_out(
        place,
        whereabouts,
        training=lambda: run_training(place, world, shard_set, run, stop, whereabouts),
        evaluation=lambda: evaluate(place, world, shard_set, run),
    )


def run_training(
    place: Place, world: World, shard_set: ShardSet, run: RunDirectory, stop: StopRequest, whereabouts: Whereabouts
) -> None:
    """Trains; checkpoints and the final model go to the run directory."""

    def build(checkpoints: Checkpoints, monitor: Monitor) -> Session:
        classes, keep, may_write = len(shard_set.classes), run.all_reduce, place.fence_of(run)
        config = settle_all_reduce(place.config, world, classes, keep, may_write, monitor.settled)
        return build_session(config, world, shard_set, run.model, checkpoints, monitor, stop)

    train_run(place, world, shard_set, run, whereabouts, build)


def run_evaluation(place: Place, world: World, shard_set: ShardSet, run: RunDirectory) -> None:
    """Evaluates the final model; rank 0 writes the predictions of every sample to the run directory."""
    config = place.config
    set_numerics(config.train)
    model = build_placed_model(config, world, len(shard_set.classes))
    precision = build_precision(config.train, world)
    precision.cast(model)
    load_weights(model, run.model / WEIGHTS)

    def prepare(counted: Callable[[int], None]) -> tuple[Loader, Predict]:
        loader, evaluator = build_evaluator(config, world, shard_set, Feed(world), precision, counted)
        return loader, lambda: evaluator.predict(model, untimed)

    predict_all(place, world, run, prepare, world.barrier)


if __name__ == "__main__":
    main()
