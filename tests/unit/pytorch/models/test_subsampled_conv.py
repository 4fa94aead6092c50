"""Strided 1x1 convolutions that drop unused pixels first: which layers they are, and that nothing else changes."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from podscale.config import ModelSection
from podscale.pytorch.models import Stem, build_model
from podscale.pytorch.models.subsampled_conv import SubsampledConv, subsample_convs

USER = "python:tests.support.user_models"


class Strides(TorchDispatchMode):
    """Recorder of the stride of each convolution that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.convolution.default:
            self.found.append(list(arguments[3]))
        return function(*arguments, **(options or {}))


class Scaled(nn.Conv2d):
    """User's convolution with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


class Direct(nn.Conv2d):
    """User's convolution that computes something else in place of torch's."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight.abs(), bias, self.stride)


def convolutions(network: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in network.named_modules() if isinstance(module, nn.Conv2d)}


def resnet18(width: int) -> nn.Module:
    return build_model(ModelSection(name="resnet18", stem="small", width=width), 5)


def test_only_strided_1x1_convolutions_of_few_channels_subsample() -> None:
    """With 8 or more channels the modules are torch's own."""
    found = {name for name, module in convolutions(resnet18(4)).items() if isinstance(module, SubsampledConv)}
    assert found == {"layer2.0.downsample.0"}
    assert {type(module) for module in convolutions(resnet18(8)).values()} == {Stem, nn.Conv2d}


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(8, 8, 1, 2),
        nn.Conv2d(4, 8, 1),
        nn.Conv2d(4, 8, 3, 2),
        nn.Conv2d(4, 8, (1, 3), 2),
        nn.Conv2d(4, 8, 1, 2, padding=1),
        nn.Conv2d(4, 8, 1, 2, groups=2),
        nn.Conv1d(4, 8, 1, 2),
        Direct(4, 8, 1, 2),
    ],
    ids=str,
)
def test_other_convolutions_stay_as_they_are(conv: nn.Module) -> None:
    kind = type(conv)
    assert type(subsample_convs(conv)) is kind


@pytest.mark.parametrize(("device", "stride"), [("cpu", 1), ("meta", 2)])
def test_only_a_cpu_subsamples(device: str, stride: int) -> None:
    """The meta device stands for a GPU."""
    with Strides() as strides:
        output = SubsampledConv(4, 8, 1, 2, bias=False, device=device)(torch.empty(2, 4, 16, 16, device=device))
    assert output.shape == (2, 8, 8, 8)
    assert strides.found == [[stride, stride]]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("stride", [2, 3, (2, 1)])
@pytest.mark.parametrize("channels", [1, 3, 7])
def test_subsampling_has_the_outputs_and_gradients_of_the_strided_convolution(
    channels: int, stride: int | tuple[int, int], layout: torch.memory_format
) -> None:
    """fp32 results are near fp64 sums over channels, also if the stride does not divide the image."""
    torch.manual_seed(0)
    conv = SubsampledConv(channels, 6, 1, stride).to(memory_format=layout)
    images = torch.randn(4, channels, 12, 7).to(memory_format=layout).requires_grad_()
    output = conv(images)
    gradient = torch.randn_like(output)
    output.backward(gradient)

    rows, columns = conv.stride
    exact = [value.detach().double().requires_grad_() for value in (images, conv.weight, conv.bias)]
    want = torch.einsum("nchw,oc->nohw", exact[0][:, :, ::rows, ::columns], exact[1][:, :, 0, 0])
    want = want + exact[2][:, None, None]
    want.backward(gradient.double())
    torch.testing.assert_close(output.double(), want, rtol=1e-5, atol=1e-5)
    for value, oracle in zip((images, conv.weight, conv.bias), exact, strict=True):
        torch.testing.assert_close(value.grad.double(), oracle.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(4, 8, 1, 2), lambda: Scaled(4, 8, 1, 2, padding="valid")])
@pytest.mark.parametrize("wrap", [lambda conv: conv, weight_norm], ids=["plain", "parametrized"])
def test_a_users_layer_keeps_its_state_and_its_results(make: Any, wrap: Any) -> None:
    """The plain layer runs in NCHW order, which has no faulty kernel."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), wrap(make()))
    network = deepcopy(plain)
    layer, calls = network[1], []
    layer.register_forward_hook(lambda *_: calls.append(1))
    assert subsample_convs(network)[1] is layer
    for copied in (network, deepcopy(network)):
        state = copied.state_dict()
        assert state.keys() == plain.state_dict().keys()
        assert all(torch.equal(array, plain.state_dict()[name]) for name, array in state.items())

    images = torch.randn(2, 3, 12, 12)
    output, want = network(images), plain(images)
    for values in (output, want):
        values.square().sum().backward()
    torch.testing.assert_close(output, want)
    for (name, value), oracle in zip(network.named_parameters(), plain.parameters(), strict=True):
        scale = float(oracle.grad.abs().max())  # differences of large sums are near 0 in a parametrized layer
        torch.testing.assert_close(value.grad, oracle.grad, rtol=0, atol=1e-6 * scale, msg=name)
    assert calls == [1]
    with Strides() as strides:
        network(images)
    assert strides.found == [[1, 1], [1, 1]]


def test_a_network_from_elsewhere_subsamples() -> None:
    network = build_model(ModelSection(name=f"{USER}:strided_pointwise"), 3)
    with Strides() as strides:
        network(torch.randn(2, 3, 16, 16))
    assert strides.found == [[1, 1]] * 3
