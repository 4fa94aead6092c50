"""AlexNet: published counts, and outputs equal to torchvision's if the layers agree."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from podscale import models
from podscale.config import ModelSection, RunConfig, loads
from podscale.pytorch.models import build_model
from tests.support.refusals import refused

PLAIN = {"convolution_norm": False, "pool5_norm": False}


def section(width: int = 64, **options: object) -> ModelSection:
    return ModelSection.model_validate({"name": "alexnet", "width": width, "alexnet": options})


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({**PLAIN, "groups": 2}, 60_965_224),  # Krizhevsky 2012, and Caffe's reference network: 244 MB in fp32
        ({**PLAIN, "groups": 1}, 62_378_344),  # the same channels without towers
        # Batch norm has 2 values per channel instead of 1 bias, and 2 x 256 after pool5.
        ({"groups": 2}, 60_965_224 + (96 + 256 + 384 + 384 + 256) + 2 * 256),
    ],
)
def test_parameter_counts(options: dict[str, object], count: int) -> None:
    spec = models.model_spec(section(**options), 1000)
    assert spec.num_parameters == count
    assert spec.num_parameters * 4 / 1e6 == pytest.approx(244 if options.get("groups") == 2 else 249.5, abs=0.2)


def test_flops_of_one_image() -> None:
    """0.72 GMAC with two groups (AlexNet's usual number), 1.14 without."""
    assert models.model_spec(section(groups=2), 1000).flops(224) / 2e9 == pytest.approx(0.715, abs=0.01)
    assert models.model_spec(section(groups=1), 1000).flops(224) / 2e9 == pytest.approx(1.136, abs=0.01)


@pytest.mark.parametrize("options", [{}, {"groups": 1}, PLAIN, {"pool5_norm": False}, {"convolution_norm": False}])
def test_the_spec_has_the_names_shapes_and_counts_of_the_network(options: dict[str, object]) -> None:
    model = section(8, **options)
    network, spec = build_model(model, 7), models.model_spec(model, 7)
    images = torch.zeros(1, 3, 224, 224)
    assert [(p.name, p.shape) for p in spec.parameters] == [(n, tuple(p.shape)) for n, p in network.named_parameters()]
    assert [(b.name, b.shape) for b in spec.buffers] == [(n, tuple(b.shape)) for n, b in network.named_buffers()]
    with FlopCounterMode(display=False) as counter:
        network(images)
    assert spec.flops(224) == counter.get_total_flops()
    outputs: list[int] = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda m, i, y: outputs.append(math.prod(y.shape)))
    network(images)
    assert spec.saved_elements(224) == 2 * sum(outputs)


def test_only_weights_decay() -> None:
    roles = {p.name: p.role for p in models.model_spec(section(convolution_norm=False), 10).parameters}
    assert {name for name, role in roles.items() if role == "weight"} == {
        f"{layer}.weight" for layer in ("conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8")
    }
    assert roles["conv1.bias"] == roles["fc8.bias"] == "bias"
    assert (roles["bn_pool5.weight"], roles["bn_pool5.bias"]) == ("norm_scale", "norm_bias")


@pytest.mark.parametrize("side", [63, 224, 100])
def test_outputs_are_those_of_torchvisions_layers(side: int) -> None:
    """torchvision's network has other channels but the same geometry, so its layers are replaced by ours."""
    torch.manual_seed(0)
    ours = build_model(section(8, **PLAIN, groups=1), 10).eval().double()
    import torchvision  # not at the top: it takes seconds, in every process that collects this test

    with torch.device("meta"):  # all its weights are replaced
        theirs = torchvision.models.AlexNet(num_classes=10).double().eval()
    numbers = {0: "conv1", 3: "conv2", 6: "conv3", 8: "conv4", 10: "conv5"}
    for number, name in numbers.items():
        mine, other = getattr(ours, name), theirs.features[number]
        theirs.features[number] = nn.Conv2d(
            mine.in_channels, mine.out_channels, other.kernel_size, other.stride, other.padding
        ).double()
        theirs.features[number].load_state_dict(mine.state_dict())
    for number, name in {1: "fc6", 4: "fc7", 6: "fc8"}.items():
        theirs.classifier[number] = getattr(ours, name)
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-12, atol=1e-12)


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    network = build_model(section(4, dropout=0.5), 3)
    network(torch.randn(4, 3, 63, 63))  # for running statistics other than zero and one
    images = torch.randn(4, 3, 63, 63)
    assert not torch.equal(network.train()(images), network(images))
    assert torch.equal(network.eval()(images), network(images))


def test_options_that_do_not_fit_alexnet_are_refused() -> None:
    def config(*changes: str) -> RunConfig:
        return loads("", overrides=["model.name=alexnet", *changes])

    config("input.image_size=63")
    with refused("alexnet", 63, field="input.image_size", got=62):
        config("input.image_size=62")
    with refused("alexnet", field="model.stem", got="small"):
        config("model.stem=small")
