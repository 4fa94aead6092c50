"""Estimated memory of the training state."""

from typing import Any

import pytest

from podscale.config import ModelSection, RunConfig, TrainSection
from podscale.models import model_spec
from podscale.training.memory_estimate import MemoryEstimate, estimate_memory, matrix_bytes, state_bytes
from podscale.training.shampoo import preconditioner_elements


@pytest.mark.parametrize(
    ("changes", "weights", "optimizer"),
    [
        ({}, 8, 4),
        ({"optimizer": {"name": "lamb"}}, 8, 8),
        ({"optimizer": {"name": "adam"}}, 8, 8),
        ({"optimizer": {"name": "shampoo"}}, 8, 4),
        ({"optimizer": {"name": "shampoo", "shampoo": {"graft": "adagrad"}}}, 8, 8),
        ({"optimizer": {"name": "nlcg"}}, 8, 12),
        ({"optimizer": {"name": "nlcg", "nlcg": {"beta": "polak_ribiere"}}}, 8, 16),
        ({"optimizer": {"name": "neumann"}}, 8, 8),
        ({"optimizer": {"name": "sgd", "shampoo": {"graft": "adagrad"}, "nlcg": {"beta": "polak_ribiere"}}}, 8, 4),
        ({"weight_update": "sharded"}, 8, 4 / 32),
        ({"weight_update": "sharded", "all_reduce": {"algorithm": "torus2d"}}, 8, 4 / 8),
        ({"weight_update": "sharded", "all_reduce": {"algorithm": "torus2d", "row": 4}}, 8, 4 / 4),
        ({"weight_update": "sharded", "weight_gather": "bf16"}, 10, 8 / 32),
        ({"weight_update": "sharded", "weight_gather": "bf16", "precision": "bf16-pure"}, 6, 8 / 32),
        ({"precision": "bf16-pure"}, 10, 4),
        ({"ema": {"decay": 0.9}}, 8, 8),
        ({"ema": {"decay": 0.9}, "weight_update": "sharded"}, 8, 8 / 32),
        ({"layer_decay": 0.5}, 8, 12),
        ({"learning_rate_scale": {"head": 2}, "weight_update": "sharded"}, 8, 12 / 32),
    ],
)
def test_bytes_per_weight_of_each_optimizer(changes: dict[str, Any], weights: int, optimizer: float) -> None:
    train = TrainSection.model_validate(changes)
    assert state_bytes(train, 3200, ranks=32, per_node=8) == (3200 * weights, 3200 * optimizer)


@pytest.mark.parametrize("ranks", [1, 4])
def test_shampoos_matrices_are_the_roots_and_a_part_of_the_statistics(ranks: int) -> None:
    """Computed by hand for one layer; tests/unit/pytorch/optim/test_shampoo.py compares with the optimizer's state."""
    train = TrainSection.model_validate({"optimizer": {"name": "shampoo", "shampoo": {"block": 16, "vectors": False}}})
    small = model_spec(ModelSection(name="resnet18", stem="small", width=4), 10)
    names = {p.name: p.shape for p in small.parameters}
    assert names["layer4.0.conv1.weight"] == (32, 16, 3, 3)  # (9, 16, 32): two blocks of (9, 16, 16)
    one = preconditioner_elements(names["layer4.0.conv1.weight"], 16, vectors=False)
    assert one == 2 * (9**2 + 16**2 + 16**2)
    elements = sum(preconditioner_elements(shape, 16, vectors=False) for shape in names.values())
    assert elements > one
    assert matrix_bytes(train, small, ranks) == 4 * elements * (1 + ranks) // ranks
    assert matrix_bytes(TrainSection(), small, ranks) == 0


def test_activations_are_those_of_the_largest_pass() -> None:
    """The batch grows fourfold: memory too, unless the accumulation grows as well."""

    def activations(*phases: dict[str, Any], batch: int = 64) -> int:
        train = {"epochs": 4, "global_batch": batch, "phases": phases}
        return estimate_memory(RunConfig.model_validate({"train": train}), 10, 1).activations

    later = {"start": 2, "global_batch": 256}
    assert activations(later) == activations(batch=256) == 4 * activations()
    assert activations({**later, "accumulation": 4}) == activations()
    assert activations({**later, "accumulation": 4}, {"start": 3, "accumulation": 1}) == activations(batch=256)


def test_frozen_parameters_have_no_gradients_and_no_optimizer_state() -> None:
    def memory(*freeze: str) -> MemoryEstimate:
        model = {"name": "resnet18", "stem": "small", "width": 16}
        return estimate_memory(RunConfig.model_validate({"model": model, "train": {"freeze": freeze}}), 10, 1)

    head = 128 * 10 + 10
    frozen = model_spec(ModelSection(name="resnet18", stem="small", width=16), 10).num_parameters - head
    whole, probe = memory(), memory("*", "!head")
    assert probe.optimizer == 4 * head
    assert (whole.weights - probe.weights, whole.optimizer - probe.optimizer) == (4 * frozen, 4 * frozen)
    assert 0 < probe.activations < whole.activations / 8
