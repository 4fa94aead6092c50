"""Kernels of 1x1 convolutions in Triton's interpreter beside torch's own operations in float64.

`python -m tests.support.gemm_oracle` prints the largest relative error of each case's results as JSON.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from podscale.pytorch.batch_norm import BatchNorm, fused_calls, gemm, gemm_calls, layer
from podscale.pytorch.batch_norm.activations import (
    Convolved,
    PendingSum,
    Projection,
    begin_block,
    convolve,
    norm_relu_convolve,
    normalise,
)
from tests.support.fused_norm_oracle import relative_error
from tests.support.triton_interpreter import adapt_interpreter

MOMENTUM = 0.3


class Shape(NamedTuple):
    """Images, their channels, and the channels of the convolution's output."""

    images: int
    inputs: int
    outputs: int
    height: int
    width: int


SHAPES = (Shape(2, 16, 48, 6, 5), Shape(3, 96, 16, 9, 10), Shape(4, 32, 80, 12, 7))
"""Some channels are no power of two, some take several steps or tiles, and some rows fill no tile."""
HALF_KINDS = ("activated", "sum, strided projection")
"""Kinds that are also checked in bf16 and with a group of ranks."""


def pointwise(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


class Case(nn.Module):
    """Functions under test between batch norms: `first` of the inputs, the others of the outputs."""

    def __init__(self, kind: str, shape: Shape) -> None:
        super().__init__()
        self.kind = kind
        stride = 2 if kind in ("strided", "sum, strided projection") else 1
        self.conv = pointwise(shape.inputs, shape.outputs, 1 if kind.startswith("sum") else stride)
        self.first, self.last = BatchNorm(shape.inputs, momentum=MOMENTUM), BatchNorm(shape.outputs, momentum=MOMENTUM)
        projected = BatchNorm(shape.outputs, momentum=MOMENTUM)
        has_projection = kind.endswith("projection")
        self.downsample = (
            Projection(pointwise(shape.inputs, shape.outputs, stride), projected) if has_projection else nn.Identity()
        )

    def forward(self, x: Tensor, shortcut: Tensor) -> tuple[Tensor, ...]:
        """Return the results of the fused functions."""
        match self.kind:
            case "plain" | "strided":
                return (normalise(self.last, convolve(self.conv, self.last, x)),)
            case "activated":
                return (normalise(self.last, norm_relu_convolve(self.first, self.conv, x)),)
        pending = PendingSum(self.first, Convolved(x), shortcut)
        y, second = begin_block(self.conv, self.last, self.downsample, pending)
        return normalise(self.last, y), second

    def separate(self, x: Tensor, shortcut: Tensor) -> tuple[Tensor, ...]:
        """Return the same by operations of torch."""
        match self.kind:
            case "plain" | "strided":
                return (_norm(self.last, self.conv(x)),)
            case "activated":
                return (_norm(self.last, self.conv(F.relu(_norm(self.first, x)))),)
        y = F.relu(_norm(self.first, x) + shortcut)
        if isinstance(self.downsample, nn.Identity):
            return _norm(self.last, self.conv(y)), y
        conv, norm = self.downsample
        return _norm(self.last, self.conv(y)), _norm(norm, conv(y))


def _norm(norm: Any, x: Tensor) -> Tensor:
    running = (norm.running_mean, norm.running_var)
    return F.batch_norm(x, *running, norm.weight, norm.bias, True, norm.momentum, norm.eps)


KINDS = ("plain", "strided", "activated", "sum", "sum, projection", "sum, strided projection")


def draw_case(kind: str, shape: Shape, dtype: torch.dtype) -> tuple[Case, Case, list[Tensor]]:
    """Return a case, its copy in float64, and images of both inputs."""
    generator = torch.Generator().manual_seed(sum(shape))
    case, oracle = Case(kind, shape), Case(kind, shape).double()
    for ours, theirs in zip(case.parameters(), oracle.parameters(), strict=True):
        ours.data.copy_(torch.randn(ours.shape, generator=generator).to(dtype))  # exact in the dtype of the images
        theirs.data.copy_(ours)
    for module in case.modules():
        if isinstance(module, BatchNorm):
            module.is_fused = module.folds_convolutions = True
    size = (shape.images, shape.inputs, shape.height, shape.width)
    images = [torch.randn(size, generator=generator) * 1.5 + 1.0 for _ in range(2)]
    return case, oracle, [image.to(dtype).contiguous(memory_format=torch.channels_last) for image in images]


def errors_of(
    kind: str,
    shape: Shape,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    *,
    device: str = "cpu",
    error: Callable[[Tensor, Tensor], float] | None = None,
) -> dict[str, float]:
    """Return the relative errors of outputs, gradients and running statistics."""
    case, oracle, images = draw_case(kind, shape, dtype)
    case.to(device)
    oracle.to(device)
    for module in case.modules():
        if isinstance(module, BatchNorm):
            module.group = group
    inputs = [image.detach().clone().to(device).requires_grad_() for image in images]
    exact_inputs = [image.to(device).double().requires_grad_() for image in images]
    outputs, expected = case(*inputs), oracle.separate(*exact_inputs)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(y.shape, generator=generator).to(dtype).to(device) for y in outputs]
    torch.autograd.backward(outputs, gradients)
    torch.autograd.backward(expected, [gradient.double() for gradient in gradients])
    found: dict[str, tuple[Any, Any]] = {
        **{f"output {n}": pair for n, pair in enumerate(zip(outputs, expected, strict=True))},
        **{f"d input {n}": (a.grad, b.grad) for n, (a, b) in enumerate(zip(inputs, exact_inputs, strict=True))},
    }
    for (name, ours), theirs in zip(case.named_parameters(), oracle.parameters(), strict=True):
        found[f"d {name}"] = (ours.grad, theirs.grad)
    for (name, ours), theirs in zip(case.named_buffers(), oracle.buffers(), strict=True):
        found[name] = (ours, theirs)
    measure = error or relative_error
    assert all((a is None) == (b is None) for a, b in found.values())
    return {name: measure(a.detach(), b.detach()) for name, (a, b) in found.items() if b is not None}


def norm_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def prepare_interpreter() -> None:
    """Let the kernels run in Triton's interpreter, in fp32 too, whose products show small faults."""
    adapt_interpreter()
    layer.GEMM_DTYPES = (*layer.GEMM_DTYPES, torch.float32)
    gemm_calls.MERGED_TILES = 2  # so that a few rows have several groups of tiles


def cases() -> Iterator[tuple[str, Shape]]:
    for number, kind in enumerate(KINDS):
        yield kind, SHAPES[number % len(SHAPES)]
        yield kind, SHAPES[(number + 1) % len(SHAPES)]


def moments_error(dtype: torch.dtype, mean: float) -> float:
    """Return the error of a convolution's mean and variance, in standard deviations and variances of its output.

    Args:
        mean: mean of the images. Far from 0, a difference of large sums has no correct digit.
    """
    x = (torch.randn(4, 16, 9, 10, generator=torch.Generator().manual_seed(0)) + mean).to(dtype)
    conv = pointwise(16, 32).to(dtype)
    y, moments = gemm.convolve(conv, x.contiguous(memory_format=torch.channels_last))
    exact = y.detach().double().transpose(0, 1).flatten(1)
    found_mean, found_var = fused_calls.local_moments(*moments)
    var = exact.var(1, correction=0)
    errors = ((found_mean - exact.mean(1)) / var.sqrt(), found_var / var - 1)
    return max(float(error.abs().max()) for error in errors)


def all_errors() -> dict[str, float]:
    """Return the largest error of each case: of elements in fp32, by the norm in bf16, both relative."""
    errors = {}
    for kind, shape in cases():
        errors[f"{kind} {tuple(shape)}"] = max(errors_of(kind, shape, torch.float32).values())
    errors["moments"] = moments_error(torch.float32, 0.0)
    errors["moments in bf16"] = moments_error(torch.bfloat16, 0.0)
    errors["moments far from zero"] = moments_error(torch.bfloat16, 100.0) / 100
    for kind in HALF_KINDS:
        found = errors_of(kind, SHAPES[0], torch.bfloat16, error=norm_error)
        errors[f"{kind} convolution in bf16"] = max(found.values())
    for number, kind in enumerate(KINDS):
        errors[f"{kind} by tensor descriptors"] = descriptor_difference(kind, SHAPES[number % len(SHAPES)])
    return errors


def descriptor_difference(kind: str, shape: Shape) -> float:
    """Return the number of results in bf16 that have other bits by tensor descriptors than by pointers."""

    def checksum(found: Tensor, expected: Tensor) -> float:
        return float(zlib.crc32(found.float().cpu().contiguous().numpy()))

    results = []
    for by_descriptors in (False, True):
        with mock.patch.object(gemm_calls, "use_descriptors", by_descriptors):
            results.append(errors_of(kind, shape, torch.bfloat16, error=checksum))
    return float(sum(a != b for a, b in zip(*(found.values() for found in results), strict=True)))


def main() -> None:
    prepare_interpreter()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    errors = all_errors()
    for kind in HALF_KINDS:
        found = errors_of(kind, SHAPES[0], torch.float32, dist.group.WORLD)
        errors[f"{kind} with a group"] = max(found.values())
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
