"""Training and evaluation of a comparison in this process, since most runs take less time than starting one."""

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


def run_comparison(comparison: Comparison) -> list[str]:
    """Train and evaluate the unfinished runs; return their names."""
    sharded = local.shard(comparison.cycles.data, comparison.cycles.run.workspace)
    assert sharded is not None, "a call without `part` packs the whole shard set"
    to_train = [c for c in comparison.trained if not (RunDirectory.for_config(c).model / MODEL_JSON).exists()]
    to_evaluate = [c for c in comparison.evaluated if not RunDirectory.for_config(c).evaluation.exists()]
    if not to_train and not to_evaluate:
        return []
    torch.set_num_threads(1)
    try:
        world, shard_set = join_world(60.0, {}), ShardSet.open(Path(sharded.location))
        for config in to_train:
            worker_env = _worker_env(config, "train", sharded.location)
            with _log(config):
                run_training(
                    worker_env, world, shard_set, RunDirectory.for_config(config), StopRequest(), ProgressTracker()
                )
        for config in to_evaluate:
            _evaluate(_worker_env(config, "evaluate", sharded.location), world, shard_set)
    finally:
        leave_world()
    return [config.run.id for config in (*to_train, *to_evaluate)]


def _evaluate(worker_env: WorkerEnv, world: World, shard_set: ShardSet) -> None:
    run = RunDirectory.for_config(worker_env.config)
    with _log(worker_env.config):
        evaluate_ensemble(worker_env, world, shard_set, run)
    evaluate_run(run.path, worker_env.config, shard_set)


def _worker_env(config: RunConfig, stage: str, shard_set: str) -> WorkerEnv:
    """Return the environment of the only rank of a stage."""
    run = stage_outcomes.prepare_run_directory(config)
    ranks = run.path / "ranks"
    ranks.mkdir(exist_ok=True)
    return WorkerEnv(config, stage, shard_set, ranks)


def _log(config: RunConfig) -> redirect_stdout[TextIOWrapper]:
    """Redirect the output of a stage to a file of the run, as a supervisor does."""
    return redirect_stdout((RunDirectory.for_config(config).path / "output.log").open("a"))
