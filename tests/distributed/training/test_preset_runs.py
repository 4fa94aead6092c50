"""Presets with combinations of options that no other has: rendered, planned, and trained for some steps on two ranks.

The network and the images are small, and the schedule is short; all else is the preset's. A second run of each is
stopped in the middle and ends with the bits of the first, so all random draws are keyed.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.cli.app import main
from podscale.cli.dry_run import describe_run
from podscale.config import RunConfig, load
from podscale.errors import Preempted
from podscale.pipelines.presets import resolve_preset
from podscale.pytorch.world import World
from tests.distributed.training.test_training import (
    assert_same_bits,
    final_state,
    losses_of,
    run_training,
    stop_after,
)

SMALL = [
    "data.source=digits",
    "input.image_size=32",
    "train.epochs=4",
    "train.global_batch=16",
    "train.precision=fp32",
    "train.schedule.warmup_epochs=1",
    "model.width=8",
    "evaluate={batch: 4, every_epochs: 0}",
    "telemetry={log_every: 1}",
    "checkpoint={asynchronous: false}",
    "launch={timeout_seconds: 60}",
]
OWN = {
    "adya2018-cifar100-16k": [
        "train.schedule.milestones=[2, 3]",
        "model.block=v2",
        "input.crop={padding: 4}",
        "input.per_image_standardization=true",
    ],
    "rsb-a2": ["data.format=auto", "model.name=resnet18", "model.stem=small", "model.stochastic_depth=0.5"],
    "torchvision-v2": ["data.format=auto", "model.name=resnet18", "model.stem=small", "train.ema.every_steps=2"],
}


def small(name: str, workspace: Path) -> RunConfig:
    return load(resolve_preset(name), [*SMALL, *OWN[name], f"run.workspace={workspace}"])


@pytest.mark.parametrize("name", OWN)
def test_a_preset_trains_and_resumes_to_the_bit(name: str, run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()
    straight, halted = (small(name, tmp_path / part) for part in ("straight", "halted"))

    def stopped(world: World) -> None:
        with pytest.raises(Preempted):
            run_training(halted, shards, world, stop_after(5, 0))

    run_world(2, lambda world: run_training(straight, shards, world))
    run_world(2, stopped)
    run_world(2, lambda world: run_training(halted, shards, world))
    losses = losses_of(straight)
    assert list(losses) == list(range(1, 13))
    assert np.isfinite(list(losses.values())).all()
    assert losses_of(halted) == losses
    assert_same_bits(final_state(halted), final_state(straight))


@pytest.mark.parametrize("name", OWN)
def test_a_preset_is_rendered_and_planned(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    claim = ["launch.cluster.workspace_claim=claim", "data.source=gs://bucket/images"]
    config = load(resolve_preset(name), claim)
    changes = [argument for change in claim for argument in ("--set", change)]
    assert main(["render", name, *changes, "--stage", "all"]) == 0
    output = capsys.readouterr().out
    assert f"name: {name}" in output
    assert re.search(rf"nvidia\.com/gpu: \W?{config.launch.resources.accelerators}\b", output)
    planned = describe_run(small(name, tmp_path))
    assert "train       to do" in planned
    assert re.search(r"^training +4 epochs of batches of 16", planned, re.MULTILINE)
