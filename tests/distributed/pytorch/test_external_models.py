"""Models of timm and torchvision on real processes: both all-reduce families, sharded updates, bit-exact resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from podscale import models
from podscale.config import RunConfig
from podscale.errors import Preempted
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.runs.model_files import WEIGHTS_FILE
from tests.distributed.training.test_training import assert_same_bits, final_state, losses_of, run_training, stop_after
from tests.support.engines import small

pytest.importorskip("timm", reason="timm is not installed (pip install 'podscale[timm]')")

TORUS = {"algorithm": "torus2d", "row": 2, "bucket_mb": 0.1}
VIT = {"name": "timm:test_vit", "options": {"img_size": 32, "drop_path_rate": 0.2, "proj_drop_rate": 0.1}}
CONVNEXT = {"name": "timm:test_convnext", "options": {"drop_path_rate": 0.2}}
EFFICIENTNET = {"name": "timm:test_efficientnet", "options": {"drop_rate": 0.2}}
REGNET = {"name": "torchvision:regnet_y_400mf"}
RUNS = {
    "vit": (VIT, {"train__all_reduce": TORUS, "train__weight_update": "sharded", "train__optimizer__name": "lamb"}),
    "convnext": (CONVNEXT, {"train__all_reduce__algorithm": "ddp", "train__channels_last": True}),
    "efficientnet": (
        EFFICIENTNET,
        {"train__all_reduce": TORUS, "train__mix": {"mixup": 0.2, "cutmix": 1.0}, "train__ema": {"decay": 0.9}},
    ),
    "regnet": (REGNET, {"train__optimizer__name": "lars", "train__precision": "bf16", "train__epochs": 2}),
}
"""Model and options of each run; together they cover the options that meet a model's layout."""


def document(workspace: Path, run: str, model: dict[str, Any], **changes: Any) -> RunConfig:
    optimizer = changes.pop("train__optimizer__name", "sgd")
    return small(
        workspace,
        run__id=run,
        input__image_size=32,
        model={**model, "batch_norm": {"span": 16}},
        train__optimizer={"name": optimizer},
        **{"train__epochs": 3, **changes},
    )


@pytest.mark.parametrize("kind", ["vit", "convnext", "efficientnet", pytest.param("regnet", marks=pytest.mark.slow)])
def test_a_resumed_training_ends_with_the_same_bits(
    kind: str, run_world: Any, make_shard_set: Any, tmp_path: Path
) -> None:
    model, changes = RUNS[kind]
    shards = make_shard_set()
    straight, halted = (document(tmp_path, run, model, **changes) for run in ("straight", "halted"))

    def body(world: World) -> None:
        run_training(straight, shards, world)
        with pytest.raises(Preempted):
            run_training(halted, shards, world, stop_after(3, 0))
        run_training(halted, shards, world)

    run_world(2, body)
    assert_same_bits(final_state(halted), final_state(straight))
    exported = load_file(RunDirectory.for_config(straight).model / WEIGHTS_FILE)
    spec = models.model_spec(straight.model, 4)
    assert {name: array.shape for name, array in exported.items()} == spec.array_shapes


@pytest.mark.parametrize("model", [VIT, EFFICIENTNET], ids=["layer norm", "batch norm"])
def test_one_rank_and_two_take_the_same_steps(
    model: dict[str, Any], run_world: Any, make_shard_set: Any, tmp_path: Path
) -> None:
    """Batch norm spans the global batch, and nothing is dropped, so only rounding differs."""
    shards = make_shard_set()
    options = {"img_size": 32} if model is VIT else {}
    alone, pair = (
        document(tmp_path, run, {**model, "options": options}, train__schedule__learning_rate=0.002)
        for run in ("alone", "pair")
    )
    run_world(1, lambda world: run_training(alone, shards, world))
    run_world(2, lambda world: run_training(pair, shards, world))
    losses = losses_of(alone)
    assert len(losses) == 9
    np.testing.assert_allclose(list(losses_of(pair).values()), list(losses.values()), rtol=2e-4)
