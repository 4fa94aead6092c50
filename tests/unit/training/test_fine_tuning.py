"""The classifier of any model, frozen parameters and factors of the learning rate by pattern and by depth."""

from typing import Any

import pytest

from podscale import models
from podscale.config import ModelSection, RunConfig, load
from podscale.config.train import TrainSection
from podscale.training.fine_tuning import frozen_names, head_names, layer_depths, learning_rate_scales
from podscale.training.preflight import model_problem
from tests.support.refusals import refused

RESNET = ModelSection(name="resnet18")
NAMES = [p.name for p in models.model_spec(RESNET, 5).parameters]
HEAD = ("fc.weight", "fc.bias")


def train(**values: Any) -> TrainSection:
    return TrainSection.model_validate(values)


def document(**values: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"name": "resnet18"}, "train": values})


@pytest.mark.parametrize(
    ("section", "head"),
    [
        ({"name": "resnet18"}, {"fc"}),
        ({"name": "alexnet"}, {"fc8"}),
        ({"name": "inception_v3"}, {"fc", "AuxLogits.fc"}),
        ({"name": "torchvision:vit_b_16"}, {"heads.head"}),
        ({"name": "torchvision:squeezenet1_0"}, {"classifier.1"}),
        ({"name": "python:tests.support.user_models:Tokens"}, {"head"}),
    ],
)
def test_the_head_is_what_depends_on_the_classes(section: dict[str, Any], head: set[str]) -> None:
    names = head_names(ModelSection.model_validate(section), 5)
    assert {name.rpartition(".")[0] for name in names} == head
    assert {name.rpartition(".")[2] for name in names} == {"weight", "bias"}


def test_patterns_freeze_and_except() -> None:
    assert set(frozen_names(train(freeze=["*", "!head"]), NAMES, HEAD)) == set(NAMES) - set(HEAD)
    frozen = frozen_names(train(freeze=["conv1.*", "layer1.*", "!*.bn?.*"]), NAMES, HEAD)
    assert frozen == ("conv1.weight", *(f"layer1.{block}.conv{n}.weight" for block in (0, 1) for n in (1, 2)))
    assert frozen_names(train(), NAMES, HEAD) == ()


@pytest.mark.parametrize(
    ("key", "value", "got", "proposal"),
    [
        ("freeze", ["layr1.0.conv1.weight"], "layr1.0.conv1.weight", "layer1.0.conv1.weight"),
        ("freeze", ["*", "!haed"], "haed", ""),
        ("learning_rate_scale", {"fx.bias": 2}, "fx.bias", "fc.bias"),
    ],
)
def test_a_pattern_without_a_parameter_is_refused(key: str, value: Any, got: str, proposal: str) -> None:
    config = document(**{key: value})
    with refused(proposal, field=f"train.{key}", got=got):
        frozen_names(config.train, NAMES, HEAD)
        learning_rate_scales(config, NAMES, 5)
    error = model_problem(config, 5)
    assert error is not None, "it is refused before anything starts"
    assert (error.field, error.got) == (f"train.{key}", got)


def test_a_run_that_trains_nothing_is_refused() -> None:
    with refused(field="train.freeze"):
        frozen_names(train(freeze=["*"]), NAMES, HEAD)


def test_depths_of_a_resnet() -> None:
    depths = layer_depths(NAMES, HEAD)
    blocks = {f"layer{stage}.{block}": 2 * (stage - 1) + block + 1 for stage in (1, 2, 3, 4) for block in (0, 1)}
    for name, depth in depths.items():
        stem = name.startswith(("conv1.", "bn1."))
        assert depth == (0 if stem else 9 if name in HEAD else blocks[name[: len("layer1.0")]]), name


TIMM_VIT = (
    """cls_token 0, patch_embed.proj.weight 0, blocks.0.attn.qkv.weight 1, blocks.10.norm1.bias 2, norm.weight 2"""
)
TIMM_CONVNEXT = """stem.0.weight 0, stages.0.blocks.0.gamma 1, stages.1.downsample.1.weight 1,
stages.1.blocks.0.mlp.fc1.weight 2"""
CONVNEXT = (
    """features.0.0.weight 0, features.1.0.block.0.weight 1, features.2.1.weight 1, features.3.0.block.0.weight 2"""
)
REGNET = """stem.0.weight 0, trunk_output.block1.block1-0.proj.0.weight 1, trunk_output.block2.block2-0.f.a.0.weight 2,
trunk_output.block2.block2-1.f.a.0.weight 3"""
VIT = """class_token 0, encoder.pos_embedding 0, encoder.layers.encoder_layer_0.ln_1.weight 1,
encoder.layers.encoder_layer_1.mlp.0.weight 2, encoder.ln.weight 2"""
INCEPTION = """Conv2d_1a_3x3.conv.weight 1, Mixed_5b.branch1x1.conv.weight 2, Mixed_5b.branch5x5_1.conv.weight 2,
Mixed_5c.branch_pool.conv.weight 3"""
INCEPTION_RESNET = """conv2d_1a.conv.weight 1, mixed_5b.branch0.conv.weight 2, mixed_5b.branch1.0.conv.weight 2,
repeat.0.branch0.conv.weight 3, repeat.1.branch1.0.conv.weight 4"""
GOOGLENET = "conv1.conv.weight 1, inception3a.branch1.conv.weight 2, inception3a.branch2.0.conv.weight 2"


@pytest.mark.parametrize(
    "listed", [TIMM_VIT, TIMM_CONVNEXT, CONVNEXT, REGNET, VIT, INCEPTION, INCEPTION_RESNET, GOOGLENET]
)
def test_depths_of_other_models(listed: str) -> None:
    expected = {name: int(depth) for name, depth in (pair.split() for pair in listed.split(","))}
    found = layer_depths([*expected, "head.weight"], ["head.weight"])
    assert found == {**expected, "head.weight": max(expected.values()) + 1}


def test_factors_multiply_and_the_last_pattern_counts() -> None:
    config = document(layer_decay=0.5, learning_rate_scale={"*.bias": 3, "head": 10})
    scales = learning_rate_scales(config, NAMES, 5)
    assert scales["fc.weight"] == scales["fc.bias"] == 10
    assert scales["layer4.1.conv2.weight"] == 0.5
    assert scales["layer4.1.bn2.bias"] == 1.5
    assert scales["layer1.0.conv1.weight"] == 0.5**8
    assert scales["conv1.weight"] == 0.5**9
    assert learning_rate_scales(document(), NAMES, 5) == {}


def test_layer_decay_needs_blocks() -> None:
    """AlexNet's layers have no blocks, so its factors would all be 1 but for the classifier."""
    config = RunConfig.model_validate({"model": {"name": "alexnet"}, "train": {"layer_decay": 0.5}})
    names = [p.name for p in models.model_spec(config.model, 5).parameters]
    with refused(field="train.layer_decay", got=0.5):
        learning_rate_scales(config, names, 5)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["train.freeze_batch_norm=true"], "train.freeze_batch_norm"),
        (["train.head=replace"], "train.head"),
        (["train.freeze=['conv1.*']", "train.precision=bf16-pure"], "train.precision"),
        (["train.layer_decay=0.5", "train.optimizer.name=nlcg"], "train.layer_decay"),
        (["train.learning_rate_scale={head: 2}", "train.optimizer.name=neumann"], "train.learning_rate_scale"),
        (["train.learning_rate_scale={head: -1}"], "train.learning_rate_scale.head"),
        (["train.freeze=['*']", "train.engine=jax"], "train.freeze"),
        (["train.start_from={run: a, weights: b.pth}"], "train.start_from.weights"),
        (["train.start_from=hf://someone/net@main"], "train.start_from.weights"),
        (["train.start_from={run: a, rename: [['a', 'b']]}"], "train.start_from.rename"),
        (["train.start_from={weights: a.pth, rename: [['(', 'b']]}"], "train.start_from.rename"),
        (["train.start_from={weights: a.pth, rename: [['(a)', '\\2']]}"], "train.start_from.rename"),
        (["train.start_from={weights: a.pth, rename: [['a', '\\g<b>']]}"], "train.start_from.rename"),
        (["train.start_from=a.pth", "train.engine=jax"], "train.start_from.weights"),
    ],
)
def test_options_that_exclude_each_other_are_refused(changes: list[str], key: str) -> None:
    with refused(field=key):
        load(None, changes)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("run-7", "run"),
        ("/workspace/runs/seven", "run"),
        ("weights.safetensors", "weights"),
        ("/x/y.pth", "weights"),
        ("timm:resnet18.a1_in1k", "weights"),
        ("torchvision:ResNet18_Weights.IMAGENET1K_V1", "weights"),
        ("hf://someone/net@" + "0f" * 20, "weights"),
    ],
)
def test_a_text_names_a_run_or_weights(text: str, kind: str) -> None:
    start = load(None, [f"train.start_from={text}"]).train.start_from
    assert getattr(start, kind) == text
