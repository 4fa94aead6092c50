"""Trainings and evaluations of a comparison, one after the other in this process: most are shorter than its start."""

from contextlib import redirect_stdout
from io import TextIOWrapper
from pathlib import Path

import torch

from benchmarks.ensemble.cases import Comparison
from podscale.config import RunConfig
from podscale.data.shard_set import ShardSet
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.step_status import StopRequest
from podscale.distributed.worker_env import WorkerEnv
from podscale.evaluation.evaluation_json import evaluate_run
from podscale.pytorch.ensemble_evaluation import evaluate_ensemble
from podscale.pytorch.worker import run_training
from podscale.pytorch.world import World, join_world, leave_world
from podscale.runs import RunDirectory, stage_outcomes
from podscale.runs.ensemble_members import MODEL_JSON
from podscale.stages import local


def carry_out(sides: Comparison) -> list[str]:
    """Train and evaluate the unfinished runs; returns their names."""
    made = local.shard(sides.cycles.data, sides.cycles.run.workspace)
    assert made is not None, "all parts at once"
    todo = [config for config in sides.trained if not (RunDirectory.for_config(config).model / MODEL_JSON).exists()]
    judge = [config for config in sides.evaluated if not RunDirectory.for_config(config).evaluation.exists()]
    if not todo and not judge:
        return []
    torch.set_num_threads(1)
    try:
        world, shard_set = join_world(60.0, {}), ShardSet.open(Path(made.location))
        for config in todo:
            place = _place(config, "train", made.location)
            with _log(config):
                run_training(place, world, shard_set, RunDirectory.for_config(config), StopRequest(), ProgressTracker())
        for config in judge:
            _evaluate(_place(config, "evaluate", made.location), world, shard_set)
    finally:
        leave_world()
    return [config.run.id for config in (*todo, *judge)]


def _evaluate(place: WorkerEnv, world: World, shard_set: ShardSet) -> None:
    run = RunDirectory.for_config(place.config)
    with _log(place.config):
        evaluate_ensemble(place, world, shard_set, run)
    evaluate_run(run.path, place.config, shard_set)


def _place(config: RunConfig, stage: str, shard_set: str) -> WorkerEnv:
    """As the only rank of the stage, with the document in the run directory."""
    run = stage_outcomes.prepare_run_directory(config)
    ranks = run.path / "ranks"
    ranks.mkdir(exist_ok=True)
    return WorkerEnv(config, stage, shard_set, ranks)


def _log(config: RunConfig) -> redirect_stdout[TextIOWrapper]:
    """Redirect the output of a stage to a file beside the run, as a supervisor does."""
    return redirect_stdout((RunDirectory.for_config(config).path / "output.log").open("a"))
