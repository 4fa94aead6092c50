"""Running average of the weights: its recursion, resuming, sharded steps, and its export."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from podscale.config import RunConfig
from podscale.errors import Preempted
from podscale.pytorch.trainer import PyTorchTrainer
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.runs.model_files import OTHER_WEIGHTS_FILES, WEIGHTS_FILE
from tests.distributed.training.test_training import (
    assert_same_bits,
    document,
    final_state,
    records_of,
    run_training,
    stop_after,
)
from tests.support.refusals import invalid

Values = dict[str, np.ndarray[Any, Any]]
DECAY, EVERY = 0.8, 2
TORUS = {"algorithm": "torus2d", "row": 2, "bucket_mb": 0.02}
SHARDED = {"train__weight_update": "sharded", "train__all_reduce": TORUS}


def averaging(workspace: Path, run: str, **changes: Any) -> RunConfig:
    ema = {"decay": DECAY, "every_steps": EVERY}
    return document(workspace, run__id=run, train__ema=ema, **{"evaluate__every_epochs": 2, **changes})


def recorded(session: PyTorchTrainer, weights: dict[int, Values]) -> None:
    """Record the weights and statistics at the start and after each step, before the average is updated."""
    step, state = session.step, session.state

    class Recording:
        set_accumulation = step.set_accumulation

        def seek(self, number: int) -> None:
            step.seek(number)
            weights[number] = state.model_arrays()

        def __call__(self, batch: Any, phase: Any) -> Any:
            result = step(batch, phase)
            weights[batch.host_batch.step + 1] = state.model_arrays()
            return result

    session.step = Recording()  # type: ignore[assignment]


def recursion(trained: dict[int, Values]) -> Values:
    """Return the average in float64, from its definition."""
    average = {name: value.astype(np.float64) for name, value in trained[0].items()}
    for step in range(EVERY, max(trained) + 1, EVERY):
        for name, value in trained[step].items():
            average[name] = DECAY * average[name] + (1 - DECAY) * value
    return average


@pytest.mark.parametrize("changes", [{}, {**SHARDED, "train__precision": "bf16-pure"}])
def test_the_average_follows_its_recursion_and_resumes_to_the_bit(
    changes: dict[str, Any], run_world: Any, make_shard_set: Any, tmp_path: Path
) -> None:
    shards = make_shard_set()
    straight, halted = averaging(tmp_path, "straight", **changes), averaging(tmp_path, "halted", **changes)

    def body(world: World) -> dict[int, Values]:
        weights: dict[int, Values] = {}
        run_training(straight, shards, world, lambda session: recorded(session, weights))
        with pytest.raises(Preempted):
            run_training(halted, shards, world, stop_after(6, 0))
        run_training(halted, shards, world)
        return weights

    trained = run_world(2, body)[0]
    state = final_state(straight)
    expected = recursion(trained)
    assert {name.removeprefix("ema/") for name in state if name.startswith("ema/")} == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(state[f"ema/{name}"], value, rtol=2e-5, atol=1e-6, err_msg=name)
    assert np.abs(state["ema/fc.weight"] - state["model/fc.weight"]).max() > 1e-3
    assert_same_bits(final_state(halted), state)


def test_evaluate_weights_chooses_the_weights_of_the_model(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()
    plain, averaged = averaging(tmp_path, "plain"), averaging(tmp_path, "averaged", evaluate__weights="ema")

    def body(world: World) -> None:
        for config in (plain, averaged):
            run_training(config, shards, world)

    run_world(1, body)
    assert_same_bits(final_state(averaged), final_state(plain))  # an evaluation restores the training weights
    for config, prefix, other in ((plain, "model/", "ema/"), (averaged, "ema/", "model/")):
        state, model = final_state(config), RunDirectory.for_config(config).model
        for file, kind in ((WEIGHTS_FILE, prefix), (OTHER_WEIGHTS_FILES[config.evaluate.weights], other)):
            arrays = load_file(model / file)
            assert_same_bits(arrays, {name: state[f"{kind}{name}"] for name in arrays})
    records = {config.run.id: records_of(config) for config in (plain, averaged)}
    evaluations = [line for line in records["plain"] if line.get("event") == "evaluated_beside"]
    ema_evaluations = [line for line in records["averaged"] if line["kind"] == "evaluation"]
    assert [line["loss"] for line in evaluations] == [line["loss"] for line in ema_evaluations]
    assert {line["weights"] for line in evaluations} == {"ema"}
    training = json.loads((RunDirectory.for_config(averaged).model / "model.json").read_text())["training"]
    assert training["weights"] == "ema"
    assert training["ema"] == {"decay": DECAY, "every_steps": EVERY}


def test_evaluating_an_average_that_is_not_kept_is_refused(tmp_path: Path) -> None:
    with invalid("train.ema.decay", field="evaluate.weights"):
        document(tmp_path, evaluate__weights="ema")
    with invalid("train.engine=pytorch", field="train.ema.decay"):
        document(tmp_path, train__engine="jax", train__ema={"decay": 0.9})
