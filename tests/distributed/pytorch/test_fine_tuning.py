"""Fine-tuning on real processes: frozen parameters keep their bits, and the loaded weights are the first ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from podscale.config import RunConfig
from podscale.errors import Preempted
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.runs.model_files import WEIGHTS_FILE
from tests.distributed.training.test_training import (
    assert_same_bits,
    final_state,
    records_of,
    run_full_training,
    stop_after,
)
from tests.support.engines import small

TORUS = {"algorithm": "torus2d", "row": 2, "bucket_mb": 0.02}
SHARDED = {"train__weight_update": "sharded", "train__all_reduce": TORUS, "train__weight_gather": "bf16"}


def pretrained(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Write weights of the small network for seven classes, all random, and return them."""
    import torch

    from podscale.pytorch.models import build_model
    from podscale.pytorch.models.state import model_arrays

    torch.manual_seed(11)
    network = build_model(small(path.parent).model, 7)
    arrays = {name: array.numpy() for name, array in model_arrays(network).items()}
    generator = np.random.default_rng(0)
    for name, array in arrays.items():
        if "running_mean" in name:  # near 0, so that no layer is dead
            arrays[name] = generator.normal(0.0, 0.1, array.shape).astype(np.float32)
        elif "running_var" in name or (name.endswith("weight") and array.ndim == 1):
            arrays[name] = generator.uniform(0.5, 1.5, array.shape).astype(np.float32)
    save_file(arrays, path)
    return arrays


def document(workspace: Path, run: str, weights: Path, **changes: Any) -> RunConfig:
    return small(workspace, run__id=run, train__start_from=str(weights), **{"train__epochs": 2, **changes})


@pytest.mark.parametrize("all_reduce", ["sharded", "ddp"])
def test_a_probe_trains_the_new_classifier_alone(
    all_reduce: str, run_world: Any, make_shard_set: Any, tmp_path: Path
) -> None:
    shards, before = make_shard_set(), pretrained(tmp_path / "weights.safetensors")
    layout = SHARDED if all_reduce == "sharded" else {"train__all_reduce__algorithm": "ddp"}
    probe = {**layout, "train__freeze": ["*", "!head"], "train__freeze_batch_norm": True, "train__ema__decay": 0.9}
    straight, halted = (document(tmp_path, run, tmp_path / "weights.safetensors", **probe) for run in ("all", "two"))

    def body(world: World) -> None:
        run_full_training(straight, shards, world)
        with pytest.raises(Preempted):
            run_full_training(halted, shards, world, stop_after(3, 1))
        (tmp_path / "weights.safetensors").rename(tmp_path / "gone") if world.is_rank0 else None
        run_full_training(halted, shards, world)  # a resumed run does not read the weights again

    run_world(2, body)
    state = final_state(straight)
    assert_same_bits(final_state(halted), state)
    assert [name for name in state if name.startswith("optimizer/") and "conv" in name] == []
    same = {name for name, array in before.items() if np.array_equal(state[f"model/{name}"], array)}
    assert same == before.keys() - {"fc.weight", "fc.bias"}
    assert state["model/fc.weight"].shape == (4, before["fc.weight"].shape[1])
    assert np.abs(state["model/fc.weight"] - state["ema/fc.weight"]).max() > 0
    exported = load_file(RunDirectory.for_config(straight).model / WEIGHTS_FILE)
    assert exported.keys() == before.keys()
    started = json.loads((RunDirectory.for_config(straight).model / "model.json").read_text())["training"][
        "started_from"
    ]
    assert (started["head"], started["skipped"]) == ("replaced", ["fc.weight", "fc.bias"])
    events = [line for line in records_of(straight) if line.get("event") == "initial_weights"]
    assert [event["initialised"] for event in events] == [["fc.weight", "fc.bias"]]


def test_statistics_of_frozen_layers_move_unless_they_are_frozen_too(
    run_world: Any, make_shard_set: Any, tmp_path: Path
) -> None:
    shards, weights = make_shard_set(), tmp_path / "weights.safetensors"
    before = pretrained(weights)
    frozen = {"train__freeze": ["layer1.*", "layer2.*"]}
    moving = document(tmp_path, "moving", weights, **frozen)
    still = document(tmp_path, "still", weights, **frozen, train__freeze_batch_norm=True)
    run_world(1, lambda world: [run_full_training(config, shards, world) for config in (moving, still)] and None)
    for config in (moving, still):
        state = final_state(config)
        for name, array in before.items():
            if name.startswith("fc."):
                continue
            is_frozen = name.startswith(("layer1.", "layer2."))
            stays = is_frozen and (config is still or "running" not in name)
            assert np.array_equal(state[f"model/{name}"], array) == stays, (config.run.id, name)


def test_a_factor_of_zero_trains_as_a_frozen_layer(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    """The sharded optimizer step sums in another order, so the other layers are the same but for rounding."""
    shards, weights = make_shard_set(), tmp_path / "weights.safetensors"
    pretrained(weights)
    layout = {**SHARDED, "train__weight_gather": "fp32"}
    scaled = document(tmp_path, "scaled", weights, **layout, train__learning_rate_scale={"layer1.*": 0.0})
    frozen = document(tmp_path, "frozen", weights, train__freeze=["layer1.*"])
    run_world(2, lambda world: [run_full_training(config, shards, world) for config in (scaled, frozen)] and None)
    one, other = final_state(scaled), final_state(frozen)
    for name in other:
        if name.startswith("model/"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-4, err_msg=name)
        if name.startswith("model/layer1.") and "running" not in name:
            assert np.array_equal(one[name], other[name]), name


def test_weights_that_do_not_fit_are_refused_on_every_rank(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards, weights = make_shard_set(), tmp_path / "weights.safetensors"
    arrays = pretrained(weights)
    del arrays["conv1.weight"]
    save_file(arrays, weights)

    def body(world: World) -> str:
        with pytest.raises(ValueError, match=r"conv1\.weight") as error:
            run_full_training(document(tmp_path, "r", weights), shards, world)
        return str(error.value.field)  # type: ignore[attr-defined]

    assert run_world(2, body) == ["train.start_from.weights"] * 2
