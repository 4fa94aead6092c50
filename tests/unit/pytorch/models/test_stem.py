"""First convolution: each way to compute it has the same result, gradient and parameters."""

import pytest
import torch

from podscale.config import ModelSection
from podscale.pytorch.models import Stem, build_model, set_stem_compute


@pytest.mark.parametrize("compute", ["padded4", "space_to_depth"])
@pytest.mark.parametrize("side", [(224, 224), (65, 80), (63, 63)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(7, 2, 3), (11, 4, 2), (3, 1, 1), (5, 3, 0)])
def test_every_way_equals_the_plain_convolution(
    compute: str, side: tuple[int, int], kernel: int, stride: int, padding: int
) -> None:
    torch.manual_seed(0)
    plain = Stem(6, kernel, stride, padding, bias=True).double()
    other = Stem(6, kernel, stride, padding, bias=True).double()
    other.load_state_dict(plain.state_dict())
    other.compute = compute
    images = torch.randn(2, 3, *side, dtype=torch.float64).to(memory_format=torch.channels_last)
    outputs, expected = other(images), plain(images)
    torch.testing.assert_close(outputs, expected, rtol=1e-13, atol=1e-13)
    direction = torch.randn_like(expected)
    (outputs * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(other.weight.grad, plain.weight.grad, rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(other.bias.grad, plain.bias.grad)


def test_a_network_keeps_its_parameters_and_its_outputs() -> None:
    torch.manual_seed(0)
    network = build_model(ModelSection(name="resnet18", width=8), 5).double().eval()
    names = {name: tuple(p.shape) for name, p in network.named_parameters()}
    images = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    outputs = {}
    for compute in ("plain", "padded4", "space_to_depth"):
        set_stem_compute(network, compute)
        assert network.conv1.compute == compute
        outputs[compute] = network(images)
    torch.testing.assert_close(outputs["padded4"], outputs["plain"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(outputs["space_to_depth"], outputs["plain"], rtol=1e-10, atol=1e-12)
    assert {name: tuple(p.shape) for name, p in network.named_parameters()} == names


def test_a_stem_without_stride_stays_plain() -> None:
    network = build_model(ModelSection(name="resnet18", width=8, stem="small"), 5)
    set_stem_compute(network, "space_to_depth")
    assert network.conv1.compute == "plain"


def test_folding_gives_channels_last_memory() -> None:
    """One copy gives NHWC memory, which convolutions on a GPU need."""
    from podscale.pytorch.models.stem import space_to_depth

    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    folded = space_to_depth(images, 2)
    assert folded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(folded, torch.nn.functional.pixel_unshuffle(images, 2))
