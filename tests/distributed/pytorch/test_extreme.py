"""Trainings with NLCG and the Neumann optimizer: stopped, resumed, restored on fewer ranks, and exported."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from podscale.config import RunConfig
from podscale.pytorch.trainer import PyTorchTrainer
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.runs.model_files import WEIGHTS_FILE
from tests.distributed.training.test_sharded_training import SHARDED, outcome, restored
from tests.distributed.training.test_training import assert_same_bits, document, final_state, losses_of, stop_after

Values = dict[str, np.ndarray[Any, Any]]
HALF = {"train__precision": "bf16-pure", "train__weight_gather": "bf16", "train__accumulation": 2}
CASES: dict[str, dict[str, Any]] = {
    "nlcg": {**SHARDED, "train__optimizer": {"name": "nlcg", "nlcg": {"beta": "polak_ribiere"}}},
    "neumann": {
        **SHARDED,
        **HALF,
        "train__optimizer": {"name": "neumann", "neumann": {"sgd_epochs": 1, "reset_epochs": 1}},
    },
}


def config_of(workspace: Path, name: str, run: str, **changes: Any) -> RunConfig:
    return document(workspace / name / run, evaluate__every_epochs=2, **{**CASES[name], **changes})


def looking(session: PyTorchTrainer, seen: list[Values]) -> None:
    """Record the parameters of every evaluation."""
    measure = session.evaluator.evaluate

    def measure_and_look(model: Any, *arguments: Any) -> Any:
        seen.append({name: p.detach().float().numpy().copy() for name, p in model.named_parameters()})
        return measure(model, *arguments)

    session.evaluator.evaluate = measure_and_look  # type: ignore[method-assign]


@pytest.mark.slow
def test_both_resume_to_the_bit_and_on_fewer_ranks(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()

    def on_four(world: World) -> dict[str, list[Values]]:
        evaluated: dict[str, list[Values]] = {name: [] for name in CASES}
        for name, seen in evaluated.items():
            straight, halted = config_of(tmp_path, name, "straight"), config_of(tmp_path, name, "halted")
            assert outcome(straight, shards, world, lambda session, seen=seen: looking(session, seen)) is not None
            assert outcome(halted, shards, world, stop_after(5, 0)) is None
            world.barrier()
            if world.is_rank0:
                shutil.copytree(Path(halted.run.workspace, "runs"), Path(halted.run.workspace, "copy0", "runs"))
            world.barrier()
            assert outcome(halted, shards, world) is not None
        return evaluated

    evaluated = run_world(4, on_four)
    for name in CASES:
        straight, halted = config_of(tmp_path, name, "straight"), config_of(tmp_path, name, "halted")
        assert_same_bits(final_state(halted), final_state(straight))
        assert losses_of(halted) == losses_of(straight)
        state, exported = final_state(straight), load_file(RunDirectory.for_config(straight).model / WEIGHTS_FILE)
        assert all(np.isfinite(value).all() for value in state.values())
        reached = reached_by(state)
        for parameter, value in reached.items():
            np.testing.assert_array_equal(exported[parameter], value)
            for rank in evaluated:  # in bf16 if the model computes in it
                np.testing.assert_allclose(rank[name][-1][parameter], value, rtol=2**-8 if name == "neumann" else 0)
        moved = any(np.abs(reached[parameter] - state[f"model/{parameter}"]).max() > 1e-4 for parameter in reached)
        assert moved == (name == "neumann"), "Neumann exports another point than it trains on"

    def on_two(world: World) -> dict[str, Values]:
        """Restore on two ranks, with another all-reduce."""
        other = {"train__all_reduce": {"algorithm": "flat"}}
        return {name: restored(config_of(tmp_path, name, "halted/copy0", **other), shards, world) for name in CASES}

    for result in run_world(2, on_two):
        for name in CASES:
            written = final_state(config_of(tmp_path, name, "halted/copy0"))
            assert_same_bits(result[name], written)


def reached_by(state: Values) -> Values:
    """Return the result by parameter from a checkpoint: Neumann's w - mu m, or the weights of other optimizers."""
    weights = {name.removeprefix("model/"): value for name, value in state.items() if name.startswith("model/")}
    displaced = "optimizer/average/fc.weight" in state
    mu = state["optimizer/mu"] if displaced else np.float32(0)
    return {
        name: value - mu * state[f"optimizer/momentum/{name}"] if displaced else value
        for name, value in weights.items()
        if f"optimizer/{'momentum' if displaced else 'direction'}/{name}" in state
    }
