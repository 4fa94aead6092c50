"""Our residual networks against torchvision's: the same weights give the same outputs, in both directions."""

from collections.abc import Callable

import pytest
import torch

from podscale import models
from podscale.config import ModelSection
from podscale.pytorch.models import build_model

torch.set_num_threads(1)


def exported(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a safetensors file of the model holds."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def peer(name: str) -> Callable[..., torch.nn.Module]:
    """torchvision's network of the same name."""
    import torchvision  # here: it takes seconds, of every process that only collects these tests

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


@pytest.mark.parametrize("name", ["resnet34", "resnet101", "resnet152"])
def test_the_family_has_torchvisions_arrays(name: str) -> None:
    with torch.device("meta"):
        ours = build_model(ModelSection(name=name), 1000)
        theirs = peer(name)()
    kept = {k: tuple(v.shape) for k, v in theirs.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert {k: tuple(v.shape) for k, v in ours.state_dict().items()} == kept


@pytest.mark.parametrize("section", [ModelSection(name="resnet18", stem="small", width=8), ModelSection(width=16)])
def test_the_catalogue_names_what_the_network_has(section: ModelSection) -> None:
    network, spec = build_model(section, 7), models.spec(section, 7)
    assert {p.name: p.shape for p in spec.parameters} == {n: tuple(p.shape) for n, p in network.named_parameters()}
    assert {b.name: b.shape for b in spec.buffers} == {n: tuple(b.shape) for n, b in network.named_buffers()}


def test_flops_are_those_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    section = ModelSection(name="resnet50", stem="small", width=16)
    with torch.device("meta"):
        network = build_model(section, 10)
        images = torch.empty(1, 3, 37, 37)
    with FlopCounterMode(display=False) as counter:
        network(images)
    assert models.spec(section, 10).flops(37) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        network(images).sum().backward()
    assert models.spec(section, 10).training_flops(37) == counter.get_total_flops()


def test_blocks_start_as_the_identity() -> None:
    gammas = dict(build_model(ModelSection(name="resnet50", width=8), 10).named_parameters())
    assert not gammas["layer2.0.bn3.weight"].any()
    assert gammas["layer2.0.bn2.weight"].all()
    plain = dict(build_model(ModelSection(name="resnet50", width=8, zero_init_last_gamma=False), 10).named_parameters())
    assert plain["layer2.0.bn3.weight"].all()


def test_one_seed_is_one_network() -> None:
    networks = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        networks.append(build_model(ModelSection(name="resnet18", width=8), 10).conv1.weight)
    assert torch.equal(networks[0], networks[1])
    assert not torch.equal(networks[0], networks[2])
