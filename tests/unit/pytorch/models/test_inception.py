"""Inception-V3 equals torchvision's network and Inception-ResNet-V2 timm's: same weights, same outputs."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from podscale import models
from podscale.config import ModelSection, RunConfig, loads
from podscale.pytorch.models import InceptionOutputs, build_model
from podscale.pytorch.train_step import TrainingLoss
from tests.support.refusals import refused


def section(name: str, **options: Any) -> ModelSection:
    return ModelSection.model_validate({"name": name, "batch_norm": {"eps": 1e-3}, **options})


def lively(network: nn.Module) -> nn.Module:
    """Return the network with random running statistics and gammas, instead of zeros and ones."""
    for module in network.modules():
        if hasattr(module, "running_var"):
            module.running_mean.normal_(0.0, 0.1)
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight, 1.0, 0.1)
    return network


def copy_weights(ours: nn.Module, theirs: nn.Module) -> None:
    arrays = dict([*ours.named_parameters(), *ours.named_buffers()])
    counters = {name for name in theirs.state_dict() if name.endswith("num_batches_tracked")}
    assert set(theirs.state_dict()) - counters == set(arrays)
    theirs.load_state_dict({name: tensor.detach() for name, tensor in arrays.items()}, strict=False)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (section("inception_v3"), 27_161_264),  # torchvision's count of its weights
        (section("inception_v3", inception={"auxiliary": 0}), 23_834_568),
        (section("inception_resnet_v2"), 55_843_464),  # timm's
    ],
    ids=["inception_v3", "without its auxiliary head", "inception_resnet_v2"],
)
def test_parameter_counts_are_the_published_ones(model: ModelSection, count: int) -> None:
    assert models.model_spec(model, 1000).num_parameters == count


def test_flops_are_the_published_ones() -> None:
    """torchvision states 5.713 GMAC for its weights, the paper of Inception-ResNet-V2 about 13."""
    assert models.model_spec(section("inception_v3"), 1000).flops(299) / 2e9 == pytest.approx(5.713, abs=5e-4)
    assert models.model_spec(section("inception_resnet_v2"), 1000).flops(299) / 2e9 == pytest.approx(13.16, abs=0.01)


def test_inception_v3_is_torchvisions() -> None:
    """Evaluation at the smallest side; training, with the auxiliary head, at the side which that head needs."""
    import torchvision  # not at the top: the import takes seconds in every process that collects this test

    torch.manual_seed(0)
    ours = lively(build_model(section("inception_v3", inception={"dropout": 0.0}), 10))
    theirs = torchvision.models.inception_v3(num_classes=10, init_weights=False, dropout=0.0)
    copy_weights(ours, theirs)
    images = torch.randn(2, 3, 299, 299)
    with torch.no_grad():
        assert torch.equal(ours.eval()(images[..., :75, :75]), theirs.eval()(images[..., :75, :75]))
        outputs, want = ours.train()(images), theirs.train()(images)
    assert isinstance(outputs, InceptionOutputs)
    torch.testing.assert_close(outputs.logits, want.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs.auxiliary, want.aux_logits, rtol=1e-5, atol=1e-5)
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, theirs.get_buffer(name), rtol=1e-5, atol=1e-6)


def test_inception_resnet_v2_is_timms() -> None:
    import timm  # not at the top: the import takes seconds in every process that collects this test

    torch.manual_seed(0)
    ours = lively(build_model(section("inception_resnet_v2", inception={"dropout": 0.0}), 10))
    theirs = timm.create_model("inception_resnet_v2", num_classes=10)
    copy_weights(ours, theirs)
    images = torch.randn(2, 3, 75, 75)
    with torch.no_grad():
        want = theirs.eval()(images)
        torch.testing.assert_close(ours.eval()(images), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("model", "side"),
    [
        (section("inception_v3", width=8), 299),
        (section("inception_v3", width=8, inception={"auxiliary": 0}), 90),
        (section("inception_resnet_v2", width=8), 90),
    ],
    ids=["inception_v3", "without its auxiliary head", "inception_resnet_v2"],
)
def test_the_spec_has_the_names_shapes_and_counts_of_the_network(model: ModelSection, side: int) -> None:
    network, images = build_model(model, 7), torch.zeros(1, 3, side, side)
    spec = models.model_spec(model, 7)
    assert {p.name: p.shape for p in spec.parameters} == {n: tuple(p.shape) for n, p in network.named_parameters()}
    assert {b.name: b.shape for b in spec.buffers} == {n: tuple(b.shape) for n, b in network.named_buffers()}
    with FlopCounterMode(display=False) as counter:
        network.eval()(images)
    assert spec.flops(side) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        labels = torch.zeros(2, dtype=torch.int64)
        TrainingLoss(0.1, 0.4)(network.train()(images.repeat(2, 1, 1, 1)), labels).backward()
    assert 2 * spec.training_flops(side) == counter.get_total_flops()


def test_the_auxiliary_head_adds_its_weighted_loss_in_training() -> None:
    logits, auxiliary = torch.randn(4, 3), torch.randn(4, 3)
    labels = torch.tensor([0, 1, 2, 0])
    whole = TrainingLoss(0.1, 0.4)(InceptionOutputs(logits, auxiliary), labels)
    parts = [F.cross_entropy(each, labels, label_smoothing=0.1) for each in (logits, auxiliary)]
    torch.testing.assert_close(whole, parts[0] + 0.4 * parts[1])
    torch.testing.assert_close(TrainingLoss(0.1, 0.4)(logits, labels), parts[0])


def test_dropout_acts_in_training_only() -> None:
    network = build_model(section("inception_resnet_v2", width=4, inception={"dropout": 0.5}), 3)
    images = torch.randn(2, 3, 90, 90)
    assert not torch.equal(network.train()(images), network(images))
    assert torch.equal(network.eval()(images), network(images))


def test_options_that_do_not_fit_the_inceptions_are_refused() -> None:
    def config(*changes: str) -> RunConfig:
        return loads("", overrides=changes)

    config("model.name=inception_v3", "input.image_size=299", "evaluate.image_size=75")
    config("model.name=inception_v3", "input.image_size=75", "model.inception.auxiliary=0")
    with refused(299, "model.inception.auxiliary=0", field="input.image_size", got=298):
        config("model.name=inception_v3", "input.image_size=298")
    with refused("inception_resnet_v2", 75, field="input.image_size", got=74):
        config("model.name=inception_resnet_v2", "input.image_size=74")
    with refused("inception_v3", field="model.blurpool"):
        config("model.name=inception_v3", "input.image_size=299", "model.blurpool=true")
    with refused("model.name=resnet50", field="model.name"):
        config("model.name=inception_v3", "input.image_size=299", "train.engine=jax")
