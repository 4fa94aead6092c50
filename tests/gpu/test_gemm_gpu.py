"""1x1 convolutions with batch norm on a CUDA device equal torch in float64, cuDNN in bf16, and train alike."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SHAPES = (
    (2, 16, 48, 6, 5),
    (3, 96, 16, 9, 10),
    (8, 64, 256, 56, 56),
    (8, 256, 64, 56, 56),
    (8, 512, 128, 28, 28),
    (16, 1024, 256, 14, 14),
    (32, 512, 2048, 7, 7),
)
"""Images, channels of inputs and outputs, height and width; the last five are layers of ResNet-50."""
KINDS = ("plain", "strided", "activated", "sum", "sum, projection", "sum, strided projection")
TOLERANCE = {"bfloat16": 0.02, "float16": 0.004}
"""Largest relative error by the norm. Gradients behind a ReLU have the most, since a rounding may change its sign."""


@pytest.fixture(autouse=True)
def _device(world: Any) -> None:
    """Skip without a CUDA device."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_results_equal_float64(kind: str, shape: tuple[int, ...], dtype: str) -> None:
    import torch

    from tests.support.gemm_oracle import Shape, errors_of, norm_error

    errors = errors_of(kind, Shape(*shape), getattr(torch, dtype), device="cuda", error=norm_error)
    assert all(error < TOLERANCE[dtype] for error in errors.values()), errors


def test_a_group_of_ranks_equals_float64(world: Any) -> None:
    import torch

    from tests.support.gemm_oracle import SHAPES, errors_of, norm_error

    group = world.consecutive_group(1)
    errors = errors_of("activated", SHAPES[0], torch.bfloat16, group, device="cuda", error=norm_error)
    assert all(error < TOLERANCE["bfloat16"] for error in errors.values()), errors


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs", "side"), [(64, 256, 56), (256, 64, 56), (1024, 2048, 14)])
def test_a_convolution_is_as_exact_as_that_of_cudnn(inputs: int, outputs: int, side: int, stride: int) -> None:
    """Output and both gradients in bf16 beside float64."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from podscale.pytorch.batch_norm import gemm

    nhwc = torch.channels_last
    x = torch.randn(8, inputs, side, side, device="cuda").bfloat16().contiguous(memory_format=nhwc)
    conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False, device="cuda").bfloat16()
    gradient = torch.randn(8, outputs, side // stride, side // stride, device="cuda").bfloat16()
    results = []
    for run in (
        lambda x, w: F.conv2d(x.double(), w.double(), stride=stride),
        lambda x, w: F.conv2d(x, w, stride=stride),
        lambda x, w: gemm.convolve(conv, x)[0],
    ):
        leaf, conv.weight.grad = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(), None
        y = run(leaf, conv.weight)
        y.backward(gradient.to(y.dtype))
        results.append([tensor.detach().double() for tensor in (y, leaf.grad, conv.weight.grad)])
    for exact, cudnn, ours in zip(*results, strict=True):
        assert (ours - exact).norm() < 1.1 * (cudnn - exact).norm() + 1e-4 * exact.norm()


def test_images_of_more_than_two_billion_values() -> None:
    """Offsets do not overflow 32 bits. Needs 10 GB."""
    import torch

    from podscale.pytorch.batch_norm import gemm_calls

    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("less than 12 GB of the device's memory are free")
    x = torch.empty(2700, 256, 56, 56, dtype=torch.bfloat16, device="cuda", memory_format=torch.channels_last)
    x.normal_()
    weight = torch.randn(64, 256, 1, 1, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    y, _ = gemm_calls.forward(x, weight, 1, None)
    expected = torch.nn.functional.conv2d(x[-1:], weight)
    assert (y[-1:].float() - expected.float()).norm() < 0.01 * expected.float().norm()


def test_the_check_before_a_training_passes() -> None:
    import torch

    from podscale.pytorch.batch_norm import gemm_check

    assert gemm_check.largest_error(torch.device("cuda")) < 0.1


def test_tensor_descriptors_give_the_bits_of_pointers() -> None:
    import torch

    from podscale.pytorch.batch_norm import gemm_check

    device = torch.device("cuda", 0)
    if not gemm_check.has_descriptors(device):
        pytest.skip("the GPU has no tensor memory accelerator: it is older than compute capability 9.0")
    found = gemm_check.compare_loads(device)
    print(found)
    assert not found.differ


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp16"])
def test_a_network_trains_as_with_separate_operations(
    make_shard_set: Any, document: Any, train_here: Any, tmp_path: Path, precision: str, cuda_graph: bool
) -> None:
    shards, model = make_shard_set(), {"name": "resnet50", "width": 16}
    states = []
    for fused in ("gemm", "norm", "off"):
        config = document(
            tmp_path / fused,
            model=model,
            size=64,
            precision=precision,
            fused_kernels=fused,
            cuda_graph=cuda_graph,
            epochs=2,
            schedule={"learning_rate": 0.01},
        )
        states.append(train_here(config, shards))
    ours, fused_norm, separate = states
    for key, expected in separate.items():
        if key.startswith("model/"):
            scale = expected.double().norm().item() + 1e-3
            error, usual = ((state[key].double() - expected.double()).norm().item() for state in (ours, fused_norm))
            assert error < 2 * usual + 5e-3 * scale, key


def test_two_runs_give_the_same_bits(make_shard_set: Any, document: Any, train_here: Any, tmp_path: Path) -> None:
    import torch

    shards, options = make_shard_set(), {"precision": "bf16", "fused_kernels": "gemm", "cuda_graph": True}
    first, second = (
        train_here(document(tmp_path / run, model={"name": "resnet50", "width": 16}, size=64, **options), shards)
        for run in ("first", "second")
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
