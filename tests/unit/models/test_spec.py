"""The catalogue against published figures and torchvision's own networks."""

import pytest

from podscale import models
from podscale.config import ModelSection
from podscale.config.model import CATALOGUE_NAMES
from tools import models_reference

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}

CIFAR_PARAMETERS = {
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
}
"""He 2015, table 6: 0.27 M, 0.46 M, 0.66 M, 0.85 M and 1.7 M."""


@pytest.mark.parametrize(("name", "count"), CIFAR_PARAMETERS.items())
def test_the_cifar_family_has_the_published_parameters(name: str, count: int) -> None:
    assert models.model_spec(ModelSection(name=name), 10).num_parameters == count
    projected = models.model_spec(ModelSection(name=name, shortcut="projection"), 10)
    assert projected.num_parameters == count + (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64), (
        "two projections with their batch norms"
    )


def test_resnet20_costs_41_million_multiply_adds_an_image() -> None:
    assert models.model_spec(ModelSection(name="resnet20"), 10).flops(32) / 2e6 == pytest.approx(40.6, abs=0.1)


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameter_counts_are_the_published_ones(name: str, count: int) -> None:
    assert models.model_spec(ModelSection(name=name), 1000).num_parameters == count


def test_resnet50_has_the_measured_costs() -> None:
    spec = models.model_spec(ModelSection(name="resnet50"), 1000)
    assert spec.flops(224) == pytest.approx(8.18e9, rel=1e-3)
    assert spec.training_flops(224) == pytest.approx(24.30e9, rel=1e-3)
    assert spec.saved_elements(224) == pytest.approx(2 * 11.1e6, rel=5e-3)
    assert sum(buffer.shape[0] for buffer in spec.buffers) == 2 * 26_560
    assert len(spec.parameters) == 161
    assert len([p for p in spec.parameters if len(p.shape) == 1]) == 107


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet152"])
def test_names_and_shapes_are_torchvisions(name: str) -> None:
    torch = pytest.importorskip("torch")
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        network = getattr(torchvision.models, name)(num_classes=10)
    spec = models.model_spec(ModelSection(name=name), 10)
    # The catalogue follows the forward pass, torchvision the order of construction: only `downsample` is elsewhere.
    assert {p.name: p.shape for p in spec.parameters} == {n: tuple(p.shape) for n, p in network.named_parameters()}
    kept = {n: tuple(b.shape) for n, b in network.named_buffers() if not n.endswith("num_batches_tracked")}
    assert {b.name: b.shape for b in spec.buffers} == kept


def test_roles_determine_weight_decay() -> None:
    roles = {p.name: p.role for p in models.model_spec(ModelSection(name="resnet18"), 10).parameters}
    assert roles["conv1.weight"] == roles["layer2.0.downsample.0.weight"] == roles["fc.weight"] == "weight"
    assert roles["bn1.weight"] == roles["layer2.0.downsample.1.weight"] == "norm_scale"
    assert roles["bn1.bias"] == "norm_bias"
    assert roles["fc.bias"] == "bias"


def test_width_and_small_stem() -> None:
    wide = models.model_spec(ModelSection(name="resnet18", stem="small"), 10)
    narrow = models.model_spec(ModelSection(name="resnet18", stem="small", width=16), 10)
    assert {p.name: p.shape for p in narrow.parameters}["conv1.weight"] == (16, 3, 3, 3)
    assert narrow.num_parameters < wide.num_parameters / 15
    assert wide.flops(32) == pytest.approx(2 * 0.5554e9, rel=0.01)  # CIFAR ResNet-18: 0.56 GMAC


def test_the_page_of_models_is_current() -> None:
    """After a change: python tools/models_reference.py."""
    assert set(models_reference.SOURCES) == set(CATALOGUE_NAMES)
    text = models_reference.PAGE.read_text(encoding="utf-8")
    assert models_reference.page(text) == text
