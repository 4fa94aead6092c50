"""Muon orthogonalises weight matrices, but not those of the input and output layer."""

from types import SimpleNamespace
from typing import Any

import pytest

from podscale import models
from podscale.config import ModelSection
from podscale.config.optimizer import OptimizerSection
from podscale.models import ModelSpec, ParamSpec
from podscale.training.param_layout import param_options

TOKENS: Any = SimpleNamespace(
    name="tokens",
    parameters=[
        ParamSpec("cls_token", (1, 1, 8), "embedding"),
        ParamSpec("patch.weight", (8, 3, 4, 4), "weight"),
        ParamSpec("patch.bias", (8,), "bias"),
        ParamSpec("block.weight", (8, 8), "weight"),
        ParamSpec("head.weight", (5, 8), "weight"),
    ],
)


def chosen(spec: ModelSpec, **options: Any) -> set[str]:
    section = OptimizerSection.model_validate({"name": "muon", **options})
    return {name for name, each in param_options(section, spec).items() if each.uses_trust_ratio}


def test_the_first_and_the_last_matrix_are_left_out() -> None:
    assert chosen(TOKENS) == {"block.weight"}
    assert chosen(TOKENS, muon={"ends": True}) == {"patch.weight", "block.weight", "head.weight"}
    assert chosen(TOKENS, decay_all=True) == {"block.weight"}


def test_a_skipped_parameter_moves_no_end() -> None:
    spec = models.model_spec(ModelSection(name="resnet18", width=4), 10)
    filters = {each.name for each in spec.parameters if len(each.shape) == 4}
    assert chosen(spec) == filters - {"conv1.weight"}
    assert chosen(spec, skip=["fc.*", "layer4.*"]) == {
        name for name in filters - {"conv1.weight"} if not name.startswith("layer4.")
    }


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_other_optimizers_scale_every_weight(name: str) -> None:
    options = param_options(OptimizerSection(name=name), TOKENS)
    assert {key for key, each in options.items() if each.uses_trust_ratio} == {
        "patch.weight",
        "block.weight",
        "head.weight",
    }
