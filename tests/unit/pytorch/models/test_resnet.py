"""Residual networks equal torchvision's: the same weights give the same outputs, in both directions."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from podscale import models
from podscale.config import ModelSection, loads
from podscale.pytorch.models import build_model
from podscale.pytorch.models.resnet import BasicBlock, BlurredConv, Bottleneck, DropPath, blur
from podscale.pytorch.train_step import DropoutRng
from podscale.pytorch.world import World
from tests.support.refusals import refused


def exported(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the content of a safetensors file of the model."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def peer(name: str) -> Callable[..., torch.nn.Module]:
    """Return torchvision's network of the same name."""
    import torchvision  # not at the top: it takes seconds, in every process that collects these tests

    network: Callable[..., torch.nn.Module] = getattr(torchvision.models, name)
    return network


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_same_weights_give_torchvisions_outputs(name: str) -> None:
    torch.manual_seed(1)
    ours = build_model(ModelSection(name=name, zero_init_last_gamma=False), 10)
    theirs = peer(name)(num_classes=10)
    for module in ours.modules():
        if hasattr(module, "running_var"):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            torch.nn.init.normal_(module.weight, 1.0, 0.2)
    theirs.load_state_dict({name: tensor.detach() for name, tensor in exported(ours).items()}, strict=True)
    images = torch.randn(2, 3, 64, 64)
    for training in (False, True):
        ours.train(training)
        theirs.train(training)
        assert torch.equal(ours(images), theirs(images))
    ours(images).square().sum().backward()
    theirs(images).square().sum().backward()
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name
    assert torch.equal(ours.bn1.running_var, theirs.bn1.running_var)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_stochastic_depth_rises_over_the_blocks_as_timms(name: str) -> None:
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        ours = build_model(ModelSection(name=name, stochastic_depth=0.3), 10)
        theirs = timm.create_model(name, drop_path_rate=0.3)
    rates = [
        getattr(block.branch, "dropout", 0.0) for block in ours.modules() if isinstance(block, Bottleneck | BasicBlock)
    ]
    other = [block for stage in (theirs.layer1, theirs.layer2, theirs.layer3, theirs.layer4) for block in stage]
    assert rates == pytest.approx([block.drop_path.drop_prob if block.drop_path else 0.0 for block in other])
    assert rates[-1] == 0.3


def test_stochastic_depth_drops_residual_branches_per_image() -> None:
    """The mean over draws is the branch itself, and evaluation drops nothing."""
    skip = DropPath(0.25)
    y = torch.randn(4000, 3, 2, 2)
    found = skip(y)
    kept = found.abs().sum((1, 2, 3)) > 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.03)
    torch.testing.assert_close(found[kept], y[kept] / 0.75)
    assert torch.equal(skip.eval()(y), y)


def test_stochastic_depth_is_refused_if_engine_or_model_lacks_it() -> None:
    with refused("train.engine=pytorch", field="model.stochastic_depth"):
        loads("{train: {engine: jax}, model: {stochastic_depth: 0.1}}")
    with refused("alexnet", field="model.stochastic_depth"):
        loads("model: {name: alexnet, stochastic_depth: 0.1}")


def test_stochastic_depth_draws_by_step_and_adds_no_parameters() -> None:
    images, world = torch.randn(8, 3, 16, 16), World(0, 1, 0, 1, torch.device("cpu"))
    section = ModelSection(name="resnet18", width=8, stem="small", zero_init_last_gamma=False)
    torch.manual_seed(2)
    plain = build_model(section, 4)
    model = build_model(section.model_copy(update={"stochastic_depth": 0.9}), 4)
    model.load_state_dict(plain.state_dict())
    randomness = DropoutRng(model, 5, world)

    def output(step: int) -> torch.Tensor:
        randomness.start_step(step)
        return model(images)

    assert torch.equal(output(3), output(3))
    assert not torch.equal(output(3), output(4))
    assert not torch.allclose(output(3), plain(images))
    assert torch.equal(model.eval()(images), plain.eval()(images)) is False, "running statistics of other branches"
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(images), plain(images))


@pytest.mark.parametrize("name", ["resnet34", "resnet101", "resnet152"])
def test_the_family_has_torchvisions_arrays(name: str) -> None:
    with torch.device("meta"):
        ours = build_model(ModelSection(name=name), 1000)
        theirs = peer(name)()
    kept = {k: tuple(v.shape) for k, v in theirs.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert {k: tuple(v.shape) for k, v in ours.state_dict().items()} == kept


class OptionA(torch.nn.Module):
    """Shortcut without parameters (He 2015), written in another way than ours: 1x1 pooling, then channels of zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.avg_pool2d(x, 1, stride=2)
        return torch.cat([x, torch.zeros_like(x)], dim=1)


def cifar_of_torchvisions_blocks(blocks: int, classes: int) -> torch.nn.Module:
    from torchvision.models.resnet import BasicBlock

    network, inputs = torch.nn.Module(), 16
    network.conv1 = torch.nn.Conv2d(3, 16, 3, padding=1, bias=False)
    network.bn1 = torch.nn.BatchNorm2d(16)
    for stage, channels in enumerate((16, 32, 64), start=1):
        row = []
        for number in range(blocks):
            halves = stage > 1 and number == 0
            row.append(BasicBlock(inputs, channels, 2 if halves else 1, OptionA() if halves else None))
            inputs = channels
        network.add_module(f"layer{stage}", torch.nn.Sequential(*row))
    network.fc = torch.nn.Linear(64, classes)
    return network


@pytest.mark.parametrize("name", ["resnet20", "resnet32"])
def test_the_cifar_family_is_that_of_torchvisions_blocks(name: str) -> None:
    torch.manual_seed(1)
    ours = build_model(ModelSection(name=name, zero_init_last_gamma=False), 10).double().eval()
    theirs = cifar_of_torchvisions_blocks((int(name[6:]) - 2) // 6, 10).double().eval()
    theirs.load_state_dict(exported(ours), strict=False)
    assert {n for n, _ in theirs.named_parameters()} == {n for n, _ in ours.named_parameters()}
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    x = theirs.bn1(theirs.conv1(images)).relu()
    x = theirs.layer3(theirs.layer2(theirs.layer1(x)))
    torch.testing.assert_close(ours(images), theirs.fc(x.mean((2, 3))), rtol=1e-12, atol=1e-12)


def test_a_blur_is_the_binomial_filter_with_zeros_outside() -> None:
    """Equal to a NumPy filter, for images in both memory orders."""
    images = np.random.default_rng(0).normal(size=(2, 5, 6, 7))
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    weights = np.outer([1, 2, 1], [1, 2, 1]) / 16
    want = sum(weights[i, j] * padded[:, :, i : i + 6, j : j + 7] for i in range(3) for j in range(3))
    for layout in (torch.contiguous_format, torch.channels_last):
        found = blur(torch.from_numpy(images).to(memory_format=layout))
        np.testing.assert_allclose(found.numpy(), want, rtol=1e-13, atol=1e-13)


def test_all_strided_convolutions_but_the_first_blur_their_images() -> None:
    """As in FFCV. The weights are those of the network without blur."""
    section = ModelSection(name="resnet50", width=16, blurpool=True)
    network = build_model(section, 10)
    blurred = {name for name, module in network.named_modules() if isinstance(module, BlurredConv)}
    assert blurred == {f"layer{stage}.0.{part}" for stage in (2, 3, 4) for part in ("conv2", "downsample.0")}
    plain = build_model(ModelSection(name="resnet50", width=16), 10)
    plain.load_state_dict(network.state_dict())
    images, conv = torch.randn(2, 32, 8, 8), network.layer2[0].conv2
    assert torch.equal(conv(images), plain.layer2[0].conv2(blur(images)))


@pytest.mark.parametrize(
    "section",
    [
        ModelSection(name="resnet18", stem="small", width=8),
        ModelSection(name="resnet18", stem="small", width=4),
        ModelSection(width=16),
        ModelSection(name="resnet20", shortcut="projection", width=128),
        ModelSection(name="resnet34", shortcut="padding", width=16, blurpool=True),
        ModelSection(name="resnet18", block="v2", width=16, blurpool=True),
        ModelSection(name="resnet50", block="v2", width=16),
        ModelSection(name="resnet20", block="v2", shortcut="padding"),
    ],
)
def test_the_spec_has_the_names_and_shapes_of_the_network(section: ModelSection) -> None:
    network, spec = build_model(section, 7), models.model_spec(section, 7)
    assert {p.name: p.shape for p in spec.parameters} == {n: tuple(p.shape) for n, p in network.named_parameters()}
    assert {b.name: b.shape for b in spec.buffers} == {n: tuple(b.shape) for n, b in network.named_buffers()}


@pytest.mark.parametrize(
    "section",
    [
        ModelSection(name="resnet50", stem="small", width=16),
        ModelSection(name="resnet50", width=16, blurpool=True),
        ModelSection(name="resnet20", width=128, blurpool=True),
        ModelSection(name="resnet50", block="v2", width=16, blurpool=True),
    ],
    ids=["small stem", "blurpool", "CIFAR", "pre-activation"],
)
def test_flops_are_those_torch_counts(section: ModelSection) -> None:
    network, images = build_model(section, 10), torch.zeros(1, 3, 37, 37)
    with FlopCounterMode(display=False) as counter:
        network(images)
    assert models.model_spec(section, 10).flops(37) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        network(images).sum().backward()
    assert models.model_spec(section, 10).training_flops(37) == counter.get_total_flops()


def test_blocks_start_as_the_identity() -> None:
    gammas = dict(build_model(ModelSection(name="resnet50", width=8), 10).named_parameters())
    assert not gammas["layer2.0.bn3.weight"].any()
    assert gammas["layer2.0.bn2.weight"].all()
    plain = dict(build_model(ModelSection(name="resnet50", width=8, zero_init_last_gamma=False), 10).named_parameters())
    assert plain["layer2.0.bn3.weight"].all()


def test_equal_seeds_give_equal_networks() -> None:
    networks = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        networks.append(build_model(ModelSection(name="resnet18", width=8), 10).conv1.weight)
    assert torch.equal(networks[0], networks[1])
    assert not torch.equal(networks[0], networks[2])
