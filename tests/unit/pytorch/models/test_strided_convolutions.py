"""Strided 1x1 convolutions of few channels on a CPU: no faulty kernel, and everything else as it was."""

import os
import platform
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from podscale.config import ModelSection
from podscale.pytorch.models import Stem, build_model
from podscale.pytorch.models.resnet import SubsampledConv
from tests.conftest import ROOT, MakeShardSet

TRAINING = """
import sys
from pathlib import Path
from tests.support.engines import small, train_in_torch

print("trained", train_in_torch(small(Path(sys.argv[1])), Path(sys.argv[2])).steps)
"""
FAULTY = re.compile(r",backward_weights,.*[,_]ic[1-7]oc\d+_ih\d+oh\d+kh1sh[2-9]")
"""In oneDNN's log, the weight gradient of a strided 1x1 convolution of fewer than 8 channels."""


def test_a_tiny_network_trains_with_the_kernels_of_avx2(make_shard_set: MakeShardSet) -> None:
    """In a process of its own, because the fault corrupts the heap: the process aborts or never leaves the kernel.

    oneDNN's log is read as well, because some processes survive the fault.
    """
    shards = make_shard_set()
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(shards.parent), str(shards)],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained 12" in done.stdout
    assert not [line for line in done.stdout.splitlines() if FAULTY.search(line)]
    if platform.machine() == "x86_64":
        assert re.search(r",backward_weights,.*kh1sh1", done.stdout), "the log of oneDNN has another form"


class Strides(TorchDispatchMode):
    """Records the stride of each convolution that torch carries out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.convolution.default:
            self.found.append(list(arguments[3]))
        return function(*arguments, **(options or {}))


def convolutions(width: int) -> dict[str, nn.Module]:
    network = build_model(ModelSection(name="resnet18", stem="small", width=width), 5)
    return {name: module for name, module in network.named_modules() if isinstance(module, nn.Conv2d)}


def test_only_strided_1x1_convolutions_of_few_channels_subsample() -> None:
    """With 8 channels or more the modules are torch's own."""
    found = {name for name, module in convolutions(4).items() if isinstance(module, SubsampledConv)}
    assert found == {"layer2.0.downsample.0"}
    assert {type(module) for module in convolutions(8).values()} == {Stem, nn.Conv2d}


@pytest.mark.parametrize(("device", "stride"), [("cpu", 1), ("meta", 2)])
def test_only_a_cpu_subsamples(device: str, stride: int) -> None:
    """torch's device without data stands for a GPU."""
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
    """fp32 against the sum over channels in fp64, also if the stride does not divide the image."""
    torch.manual_seed(0)
    conv = SubsampledConv(channels, 6, 1, stride, bias=False).to(memory_format=layout)
    images = torch.randn(4, channels, 12, 7).to(memory_format=layout).requires_grad_()
    output = conv(images)
    gradient = torch.randn_like(output)
    output.backward(gradient)

    rows, columns = conv.stride
    exact = [value.detach().double().requires_grad_() for value in (images, conv.weight)]
    want = torch.einsum("nchw,oc->nohw", exact[0][:, :, ::rows, ::columns], exact[1][:, :, 0, 0])
    want.backward(gradient.double())
    torch.testing.assert_close(output.double(), want, rtol=1e-5, atol=1e-5)
    for value, oracle in zip((images, conv.weight), exact, strict=True):
        torch.testing.assert_close(value.grad.double(), oracle.grad, rtol=1e-5, atol=1e-5)
