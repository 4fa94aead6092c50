"""The memory that `podscale run --dry-run` foresees for the state of a training."""

from typing import Any

import pytest

from podscale.commands.outline import _state_bytes
from podscale.config import TrainSection


@pytest.mark.parametrize(
    ("changes", "weights", "optimizer"),
    [
        ({}, 8, 4),
        ({"optimizer": {"name": "lamb"}}, 8, 8),
        ({"weight_update": "sharded"}, 8, 4 / 32),
        ({"weight_update": "sharded", "all_reduce": {"algorithm": "torus2d"}}, 8, 4 / 8),
        ({"weight_update": "sharded", "all_reduce": {"algorithm": "torus2d", "row": 4}}, 8, 4 / 4),
        ({"weight_update": "sharded", "weight_gather": "bf16"}, 10, 8 / 32),
        ({"weight_update": "sharded", "weight_gather": "bf16", "precision": "bf16-pure"}, 6, 8 / 32),
        ({"precision": "bf16-pure"}, 10, 4),
        ({"ema": {"decay": 0.9}}, 8, 8),
        ({"ema": {"decay": 0.9}, "weight_update": "sharded"}, 8, 8 / 32),
    ],
)
def test_sharding_divides_what_the_optimizer_keeps(changes: dict[str, Any], weights: int, optimizer: float) -> None:
    train = TrainSection.model_validate(changes)
    assert _state_bytes(train, 3200, ranks=32, per_node=8) == (3200 * weights, 3200 * optimizer)
