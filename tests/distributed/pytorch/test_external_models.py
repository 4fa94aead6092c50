"""Models of timm and torchvision on real processes: both all-reduce families, sharded updates, bit-exact resume."""

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
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
from tests.support.shard_set import make_shard_set

pytestmark = [
    pytest.mark.timeout(900),  # the first test waits for the trainings of all, possibly on a busy machine
    pytest.mark.skipif(  # not imported here: that takes seconds, in every process that collects these tests
        find_spec("timm") is None, reason="timm is not installed (pip install 'podscale[timm]')"
    ),
]
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
    "regnet": (REGNET, {"train__optimizer__name": "lars", "train__precision": "bf16"}),
}
"""Model and options of each run; together they cover the options that meet a model's layout."""


PAIRS = {"layer norm": {**VIT, "options": {"img_size": 32}}, "batch norm": {**EFFICIENTNET, "options": {}}}
"""Models without dropout, to compare one rank with two."""


def document(workspace: Path, run: str, model: dict[str, Any], **changes: Any) -> RunConfig:
    optimizer = changes.pop("train__optimizer__name", "sgd")
    return small(
        workspace,
        run__id=run,
        input__image_size=32,
        model={**model, "batch_norm": {"span": 16}},
        train__optimizer={"name": optimizer},
        train__epochs=2,
        **changes,
    )


def straight_and_halted(workspace: Path, kind: str) -> tuple[RunConfig, RunConfig]:
    model, changes = RUNS[kind]
    straight, halted = (document(workspace, f"{kind}-{run}", model, **changes) for run in ("straight", "halted"))
    return straight, halted


def stop_and_resume(workspace: Path, shards: Path, kinds: Iterable[str], world: World) -> None:
    for straight, halted in (straight_and_halted(workspace, kind) for kind in kinds):
        run_training(straight, shards, world)
        with pytest.raises(Preempted):
            run_training(halted, shards, world, stop_after(1, 0))
        run_training(halted, shards, world)


def train_pairs(workspace: Path, shards: Path, world: World) -> None:
    for name, model in PAIRS.items():
        run = f"{name.replace(' ', '-')}-{world.size}"
        run_training(document(workspace, run, model, train__schedule__learning_rate=0.002), shards, world)


@pytest.fixture(scope="module")
def workspace(run_world: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workspace with the runs of all tests but the slow one, of three ranks: each imports timm, which takes seconds."""
    folder = tmp_path_factory.mktemp("external")
    shards = make_shard_set(folder / "shards")
    run_world(1, partial(train_pairs, folder, shards))

    def body(world: World) -> None:
        train_pairs(folder, shards, world)
        stop_and_resume(folder, shards, ("vit", "convnext", "efficientnet"), world)

    run_world(2, body, seconds=600)
    return folder


def assert_resumed_to_the_bit(workspace: Path, kind: str) -> None:
    straight, halted = straight_and_halted(workspace, kind)
    assert_same_bits(final_state(halted), final_state(straight))
    exported = load_file(RunDirectory.for_config(straight).model / WEIGHTS_FILE)
    spec = models.model_spec(straight.model, 4)
    assert {name: array.shape for name, array in exported.items()} == spec.array_shapes


@pytest.mark.parametrize("kind", ["vit", "convnext", "efficientnet"])
def test_a_resumed_training_ends_with_the_same_bits(kind: str, workspace: Path) -> None:
    assert_resumed_to_the_bit(workspace, kind)


@pytest.mark.slow
def test_a_resumed_training_of_a_large_network_ends_with_the_same_bits(
    run_world: Any, make_shard_set: Any, tmp_path: Path
) -> None:
    run_world(2, partial(stop_and_resume, tmp_path, make_shard_set(), ["regnet"]))
    assert_resumed_to_the_bit(tmp_path, "regnet")


@pytest.mark.parametrize("name", PAIRS)
def test_one_rank_and_two_take_the_same_steps(name: str, workspace: Path) -> None:
    """Batch norm spans the global batch, and nothing is dropped, so only rounding differs."""
    alone, pair = (document(workspace, f"{name.replace(' ', '-')}-{size}", PAIRS[name]) for size in (1, 2))
    losses = losses_of(alone)
    assert len(losses) == 6
    np.testing.assert_allclose(list(losses_of(pair).values()), list(losses.values()), rtol=2e-4)
