"""Options of a step that exclude each other: one error, with the field and advice."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from podscale.config import RunConfig, dumps, loads
from podscale.config.optimizer import OPTIMIZER_NAMES
from tests.support.refusals import refused

TORUS = {"algorithm": "torus2d"}


@pytest.mark.parametrize(
    ("train", "key", "hint"),
    [
        ({"precision": "fp16", "loss_scale": 1.0}, "train.loss_scale", "bf16"),
        ({"weight_gather": "bf16"}, "train.weight_gather", "train.weight_update=sharded"),
        ({"weight_update": "sharded", "all_reduce": {"algorithm": "ddp"}}, "train.all_reduce.algorithm", "another"),
        ({"weight_update": "sharded", "all_reduce": {"algorithm": "tree"}}, "train.all_reduce.algorithm", "torus2d"),
        ({"precision": "bf16-pure", "all_reduce": {"algorithm": "ddp"}}, "train.all_reduce.algorithm", "another"),
        ({"optimizer": {"name": "lamb", "nesterov": True}}, "train.optimizer.nesterov", "Leave it out."),
        ({"optimizer": {"name": "lamb", "momentum_form": "scaled"}}, "train.optimizer.momentum_form", "Leave it out."),
        ({"optimizer": {"name": "lars", "beta2": 0.9}}, "train.optimizer.beta2", "Leave it out."),
        ({"optimizer": {"eps": 0.0}}, "train.optimizer.eps", "Leave it out."),
        ({"optimizer": {"nesterov": True, "momentum": 0}}, "train.optimizer.nesterov", "train.optimizer.momentum"),
        ({"optimizer": {"nlcg": {"beta": "polak_ribiere"}}}, "train.optimizer.nlcg.beta", "Leave it out."),
        ({"optimizer": {"name": "nlcg", "momentum": 0.8}}, "train.optimizer.momentum", "Leave it out."),
        ({"optimizer": {"name": "nlcg", "neumann": {"alpha": 0}}}, "train.optimizer.neumann.alpha", "Leave it out."),
        (
            {"optimizer": {"name": "nlcg"}, "schedule": {"momentum_start": 0.5}},
            "train.schedule.momentum_start",
            "Leave it out.",
        ),
        (
            {"optimizer": {"name": "neumann"}, "phases": [{"start": 50, "reset_momentum": True}]},
            "train.phases.0.reset_momentum",
            "Leave it out.",
        ),
        ({"optimizer": {"name": "neumann"}, "epochs": 4}, "train.optimizer.neumann.sgd_epochs", "=sgd"),
        ({"optimizer": {"name": "neumann"}, "epochs": 9}, "train.optimizer.neumann.reset_epochs", "Lower it."),
        ({"all_reduce": {"algorithm": "torus2d", "shard_over": "world"}}, "train.all_reduce.shard_over", "sharded"),
        (
            {"cuda_graph": True, "phases": [{"start": 1, "batch_norm_momentum": 0.1}]},
            "train.phases.0.batch_norm_momentum",
            "train.cuda_graph=false",
        ),
        ({"optimizer": {"name": "adam", "eps": 0}}, "train.optimizer.eps", "train.optimizer.eps above 0"),
        ({"optimizer": {"shampoo": {"block": 64}}}, "train.optimizer.shampoo.block", "Leave it out."),
        ({"optimizer": {"name": "shampoo"}, "weight_update": "sharded"}, "train.weight_update", "replicated"),
        ({"optimizer": {"name": "muon"}, "weight_update": "sharded"}, "train.weight_update", "replicated"),
        ({"optimizer": {"muon": {"iterations": 3}}}, "train.optimizer.muon.iterations", "Leave it out."),
        ({"optimizer": {"name": "shampoo"}, "cuda_graph": True}, "train.cuda_graph", "train.cuda_graph=false"),
        ({"spatial_partitions": [2, 1]}, "train.spatial_partitions", "train.engine=jax"),
        ({"steps_per_call": 4}, "train.steps_per_call", "train.engine=jax"),
    ],
)
def test_conflicts(train: dict[str, Any], key: str, hint: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"train": train})
    (error,) = caught.value.errors()
    assert error["ctx"]["key"] == key
    assert hint in error["ctx"]["hint"]
    assert error["msg"].startswith(f"{key}: ")


@pytest.mark.parametrize(
    "train",
    [
        {"precision": "fp16"},
        {"weight_update": "sharded", "weight_gather": "bf16", "precision": "bf16-pure", "all_reduce": TORUS},
        {"optimizer": {"momentum_form": "unscaled"}, "schedule": {"momentum_correction": True}},
        {"optimizer": {"name": "lars"}, "schedule": {"momentum_correction": True}},
        {"engine": "jax", "optimizer": {"name": "shampoo"}, "phases": [{"start": 1, "batch_norm_momentum": 0.1}]},
        {"weight_update": "sharded", "all_reduce": {**TORUS, "shard_over": "world"}},
    ],
)
def test_what_goes_together(train: dict[str, Any]) -> None:
    RunConfig.model_validate({"train": train})


@pytest.mark.parametrize(
    ("neumann", "key", "got"),
    [({"sgd_epochs": 0}, "sgd_epochs", 0), ({"momentum_start": 0.95}, "momentum_start", 0.95)],
)
def test_what_the_neumann_optimizer_cannot_begin_with(neumann: dict[str, Any], key: str, got: float) -> None:
    with refused(field=f"train.optimizer.neumann.{key}", got=got):
        loads(json.dumps({"train": {"optimizer": {"name": "neumann", "neumann": neumann}}}))


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_a_resolved_document_of_any_rule_is_taken_back(name: str) -> None:
    """A resolved document has every option, those of other optimizers at their defaults."""
    config = RunConfig.model_validate({"train": {"optimizer": {"name": name}}})
    assert loads(dumps(config)) == config


def test_a_rule_named_by_an_override_comes_without_the_options_of_the_one_before() -> None:
    text = "train: {optimizer: {name: sgd, nesterov: true, weight_decay: 0.5}}"
    optimizer = loads(text, overrides=["train.optimizer.name=nlcg", "train.optimizer.nlcg.step=none"]).train.optimizer
    assert (optimizer.nesterov, optimizer.weight_decay, optimizer.nlcg.step) == (False, 0.5, "none")
    with refused("sgd, lars, shampoo and muon", field="train.optimizer.nesterov"):
        loads(text, overrides=["train.optimizer.name=nlcg", "train.optimizer.nesterov=true"])
    with refused(field="train.optimizer.name", got="nlgc"):
        loads(text, overrides=["train.optimizer.name=nlgc"])


def test_every_rule_has_its_own_form_and_epsilon() -> None:
    rules = {
        name: RunConfig.model_validate({"train": {"optimizer": {"name": name}}}).train.optimizer
        for name in OPTIMIZER_NAMES
    }
    assert {name for name, rule in rules.items() if rule.effective_momentum_form == "unscaled"} == {"lars"}
    effective = {name: rule.effective_eps for name, rule in rules.items() if rule.effective_eps}
    assert effective == {"lamb": 1e-6, "adam": 1e-8, "rmsprop": 1e-8}
