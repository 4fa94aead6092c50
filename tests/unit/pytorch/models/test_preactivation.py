"""Pre-activated residual networks (He 2016) against a float64 oracle, timm's network, and the released counts."""

from typing import Any

import numpy as np
import pytest
import torch

from podscale import models
from podscale.config import ModelSection, loads
from podscale.pytorch.models import build_model
from podscale.pytorch.models.resnet import PreactivatedBlock
from tests.support.preactivation import logits, sum_along
from tests.support.refusals import refused

CLASSES = 5


def section(name: str, **options: Any) -> ModelSection:
    return ModelSection.model_validate({"name": name, "block": "v2", **options})


def drawn(model: ModelSection, classes: int = CLASSES) -> torch.nn.Module:
    """Return a network in float64 without weights of 0 or 1."""
    torch.manual_seed(2)
    network = build_model(model, classes).double()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
            elif not parameter.any():
                parameter.normal_(0.0, 0.1)
    return network


def weights_of(network: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in network.named_parameters()}


def gradients_along(network: torch.nn.Module, images: np.ndarray, direction: np.ndarray) -> dict[str, np.ndarray]:
    (network(torch.from_numpy(images)) * torch.from_numpy(direction)).sum().backward()
    return {name: parameter.grad.numpy() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize(
    ("model", "side"),
    [(section("resnet20", width=16), 9), (section("resnet50", width=4), 33), (section("resnet18", width=4), 33)],
    ids=["resnet20", "resnet50", "resnet18"],
)
def test_outputs_and_gradients_are_those_of_the_equations(model: ModelSection, side: int) -> None:
    """Gradients against central differences of the oracle: of resnet20 in each parameter, else in all together."""
    network, generator = drawn(model).train(), np.random.default_rng(1)
    images = generator.normal(size=(3, 3, side, side))
    weights = weights_of(network)
    found = network(torch.from_numpy(images)).detach().numpy()
    np.testing.assert_allclose(found, logits(weights, images), rtol=1e-10, atol=1e-10)
    along = generator.normal(size=found.shape)
    gradients = gradients_along(network, images, along)
    steps = {name: generator.normal(size=value.shape) for name, value in weights.items()}
    groups = [[name] for name in weights] if model.name == "resnet20" else [list(weights)] * 2
    for names in groups:
        small = {name: 1e-8 * steps[name] for name in names}
        up, down = (
            sum_along({**weights, **{name: weights[name] + sign * small[name] for name in names}}, images, along)
            for sign in (1, -1)
        )
        want = sum(float((gradients[name] * small[name]).sum()) for name in names)
        scale = sum(float(np.abs(gradients[name] * small[name]).sum()) for name in names)
        assert (up - down) / 2 == pytest.approx(want, rel=1e-4, abs=1e-5 * scale + 1e-14), names
        steps = {name: generator.normal(size=value.shape) for name, value in weights.items()}


TIMM = {"conv1": "stem.conv", "bn_last": "norm", "fc": "head.fc"}


def timms_name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    if not layer.startswith("layer"):
        return f"{TIMM[layer]}.{kind}"
    stage, block, part = layer.split(".", 2)
    part = part.replace("bn", "norm").replace("downsample.0", "downsample.conv")
    return f"stages.{int(stage[5:]) - 1}.blocks.{block}.{part}.{kind}"


def test_resnet50_v2_is_timms() -> None:
    """timm's `resnetv2_50`, written by others, has the same weights and outputs."""
    timm = pytest.importorskip("timm")
    network = drawn(section("resnet50"), 7).train()
    theirs = timm.create_model("resnetv2_50", num_classes=7).double().train()
    arrays = theirs.state_dict()
    ours = dict(network.named_parameters())
    assert {timms_name(name) for name in ours} == {name for name, _ in theirs.named_parameters()}
    theirs.load_state_dict(
        {**arrays, **{timms_name(n): t.detach().reshape(arrays[timms_name(n)].shape) for n, t in ours.items()}}
    )
    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(network(images), theirs(images), rtol=1e-9, atol=1e-9)


def test_parameter_counts_are_those_of_the_released_code() -> None:
    """ResNet-32 v2 counted from the layers that TensorFlow's official model lists; ResNet-50 v2 is timm's count."""
    assert models.model_spec(section("resnet50"), 1000).num_parameters == 25_549_352
    count = 3 * 9 * 16 + 2 * 64 + 64 * 100 + 100
    inputs = 16
    for channels in (16, 32, 64):
        count += inputs * channels  # the projection, also in the first stage
        for _ in range(5):
            count += 2 * inputs + inputs * channels * 9 + 2 * channels + channels * channels * 9
            inputs = channels
    assert models.model_spec(section("resnet32"), 100).num_parameters == count


def test_blocks_start_as_their_shortcuts_and_learn() -> None:
    """A gamma of 0 before the last ReLU would leave a branch without gradients for ever."""
    torch.manual_seed(0)
    network = build_model(section("resnet50", width=8), CLASSES)
    blocks = [module for module in network.modules() if isinstance(module, PreactivatedBlock)]
    assert len(blocks) == 16
    x = torch.randn(4, 32, 6, 6)
    assert torch.equal(network.layer1[1](x), x)
    network(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert all(block.conv3.weight.grad.any() for block in blocks)
    assert all(block.bn3.weight.all() for block in blocks)
    plain = build_model(section("resnet20", zero_init_last_gamma=False), CLASSES)
    assert all(m.conv2.weight.any() for m in plain.modules() if isinstance(m, PreactivatedBlock))


def test_padded_shortcuts_have_no_parameters() -> None:
    names = [p.name for p in models.model_spec(section("resnet20", shortcut="padding"), 10).parameters]
    assert not [name for name in names if "downsample" in name]
    model = section("resnet20", shortcut="padding", width=16)
    network, images = drawn(model).train(), np.random.default_rng(0).normal(size=(2, 3, 8, 8))
    found = network(torch.from_numpy(images)).detach().numpy()
    np.testing.assert_allclose(found, logits(weights_of(network), images), rtol=1e-10, atol=1e-10)


def test_other_networks_have_no_blocks() -> None:
    with refused(field="model.block", got="v3"):
        loads("model: {block: v3}")
    for name, size in (("alexnet", 224), ("inception_v3", 299)):
        with refused(name, field="model.block"):
            loads(f"{{model: {{name: {name}, block: v2}}, input: {{image_size: {size}}}}}")
