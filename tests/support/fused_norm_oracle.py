"""Fused batch norm in Triton's interpreter beside torch's own operations in float64.

`python -m tests.support.fused_norm_oracle` prints the largest relative error of each case's results as JSON.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from podscale.pytorch.batch_norm import BatchNorm, fused_calls
from podscale.pytorch.batch_norm.activations import norm_add_relu, norm_relu, norm_relu_pool, split_fork
from tests.support.triton_interpreter import adapt_interpreter

SHAPES = ((3, 8, 6, 4), (2, 24, 10, 14), (5, 64, 8, 8), (1, 320, 2, 6), (7, 16, 18, 22))
"""Images; some channels are no power of two, some rows fill no tile, and some images need several chunks."""
KINDS: dict[str, Callable[..., Any]] = {
    "norm": lambda norm, x, shortcut: norm(x),
    "relu": lambda norm, x, shortcut: norm_relu(norm, x),
    "sum": lambda norm, x, shortcut: norm_add_relu(norm, nn.Identity(), x, shortcut),
    "pool": lambda norm, x, shortcut: norm_relu_pool(norm, nn.MaxPool2d(3, 2, 1), x),
}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def exact_output(kind: str, oracle: nn.Module, x: Tensor, shortcut: Tensor) -> Tensor:
    y = oracle(x)
    match kind:
        case "norm":
            return y
        case "relu":
            return F.relu(y)
        case "sum":
            return F.relu(y + shortcut)
    return F.max_pool2d(F.relu(y), 3, 2, 1)


def errors_of(
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    *,
    mean: float = 1.0,
    device: str = "cpu",
) -> dict[str, float]:
    """Return the relative errors of outputs, gradients and running statistics."""
    generator = torch.Generator().manual_seed(sum(shape))

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    channels = shape[1]
    layer, oracle = BatchNorm(channels, momentum=0.3), nn.BatchNorm2d(channels, momentum=0.3).double()
    for name, values in (("weight", draw(channels)), ("bias", draw(channels))):
        layer.get_parameter(name).data.copy_(values)
        oracle.get_parameter(name).data.copy_(values)
    layer.to(device)
    layer.is_fused, layer.group = True, group
    nhwc = torch.channels_last
    images = [(draw(*shape) * 1.5 + mean).to(dtype).contiguous(memory_format=nhwc) for _ in range(2)]
    x, shortcut = (image.detach().clone().to(device).requires_grad_() for image in images)
    assert layer.runs_fused(x)
    outputs = split_fork(KINDS[kind](layer, x, shortcut))
    exact_x, exact_shortcut = (image.double().requires_grad_() for image in images)
    expected = exact_output(kind, oracle, exact_x, exact_shortcut)
    y = outputs.branch
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=nhwc)
    first, second = (draw(*y.shape).to(dtype) for _ in range(2))
    (y * first.to(device)).sum().backward(retain_graph=True)
    single = x.grad.clone()
    x.grad = None
    layer.zero_grad()
    shortcut.grad = None
    ((y * first.to(device)).sum() + (outputs.shortcut * second.to(device)).sum()).backward()
    (expected * first.double()).sum().backward(retain_graph=True)
    exact_single = exact_x.grad.clone()
    for tensor in (exact_x, exact_shortcut):
        tensor.grad = None
    oracle.zero_grad()
    (expected * (first.double() + second.double())).sum().backward()
    found = {
        "output": (y.detach(), expected.detach()),
        "dx of one consumer": (single, exact_single),
        "dx": (x.grad, exact_x.grad),
        "dw": (layer.weight.grad, oracle.weight.grad),
        "db": (layer.bias.grad, oracle.bias.grad),
        "running mean": (layer.running_mean, oracle.running_mean),
        "running variance": (layer.running_var, oracle.running_var),
    }
    if kind == "sum":
        found["d shortcut"] = (shortcut.grad, exact_shortcut.grad)
    return {name: relative_error(ours.cpu(), theirs) for name, (ours, theirs) in found.items()}


def largest_error(
    kind: str, shape: tuple[int, ...], group: dist.ProcessGroup | None = None, *, mean: float = 1.0
) -> float:
    """Return the largest relative error in fp32."""
    return max(errors_of(kind, shape, torch.float32, group, mean=mean).values())


def cases(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    for dtype in dtypes:
        for kind in KINDS:
            for shape in SHAPES:
                yield kind, shape, dtype


@contextmanager
def several_tiles() -> Iterator[None]:
    """Let a chunk of 65 rows or more have several tiles, as chunks on a GPU have."""
    with mock.patch.multiple(fused_calls, TILE=1024, PROGRAMS_PER_PROCESSOR=1):
        yield


def main() -> None:
    adapt_interpreter()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    errors = {}
    for kind, shape, _ in cases((torch.float32,)):
        errors[f"{kind} {shape}"] = largest_error(kind, shape)
    shape = (2, 24, 10, 14)
    for kind in KINDS:
        errors[f"{kind} with a group"] = largest_error(kind, shape, dist.group.WORLD)
        errors[f"{kind} far from zero"] = largest_error(kind, shape, mean=300.0) / 100
        with several_tiles():
            errors[f"{kind} in several tiles"] = largest_error(kind, shape)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
