"""Fused batch norm: results against float64, the code for GPUs, and where it applies."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from podscale.config import ModelSection
from podscale.pytorch.batch_norm import BatchNorm, fuse_layers
from podscale.pytorch.models import build_model
from tests.support.triton_kernels import (
    KERNEL_FAILURES,
    REGISTERS,
    SHARED_MEMORY_BYTES,
    compile_kernel,
    interpret,
    kernel_failure,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "cases"),
    [("fused_norm_oracle", 32), ("fused_norm_ranks", 4)],
    ids=["one rank", "two ranks of unequal batches"],
)
def test_results_equal_float64(module: str, cases: int) -> None:
    """Outputs, gradients of one and of two consumers, running statistics; also far from zero."""
    errors = json.loads(interpret("-m", f"tests.support.{module}"))
    assert len(errors) == cases
    assert all(error < 2e-6 for error in errors.values()), errors


IMAGES = ("x", "y", "shortcut", "gradient", "second_gradient", "masked", "dx", "pooled")
TYPES = {
    **dict.fromkeys(IMAGES, "*bf16"),
    **dict.fromkeys(("bits", "indices"), "*u8"),
    **dict.fromkeys(("rows", "channels", "chunk", "parts", "columns", "height", "width", "outputs"), "i32"),
    **dict.fromkeys(("eps", "momentum"), "fp32"),
}
WIDE, NARROW = {"block_rows": 16, "block_channels": 256}, {"block_rows": 64, "block_channels": 64}
FINISH = {"block_parts": 128, "block_channels": 16}
POOL, SQUARES = {"block_rows": 64, "block_channels": 64}, {"block_rows": 16, "block_channels": 64}
KERNELS = [
    ("fused_kernels._moments_kernel", NARROW, 8, 0),
    ("fused_kernels._moments_kernel", WIDE, 8, 0),
    ("fused_kernels._finish_moments_kernel", {"affine": True, **FINISH}, 0, 0),
    ("fused_kernels._normalise_kernel", {"relu": 1, **NARROW}, 4, 4),
    ("fused_kernels._normalise_kernel", {"relu": 2, **WIDE}, 8, 4),
    ("fused_kernels._gradient_sums_kernel", {"relu": 1, "has_second": False, **NARROW}, 8, 0),
    ("fused_kernels._gradient_sums_kernel", {"relu": 2, "has_second": True, **WIDE}, 12, 4),
    ("fused_kernels._finish_gradient_sums_kernel", {"local": True, **FINISH}, 0, 0),
    ("fused_kernels._input_gradient_kernel", {"relu": 1, **NARROW}, 8, 4),
    ("fused_pool_kernels._pool_kernel", POOL, 18, 2),
    ("fused_pool_kernels._pool_gradient_sums_kernel", {"has_second": True, **SQUARES}, 12, 0),
    ("fused_pool_kernels._pool_input_gradient_kernel", {"has_second": True, **SQUARES}, 12, 4),
]
"""Kernels with constants and the least number of vectors that a thread loads and stores: 8 values of every image."""


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in SHARED_MEMORY_BYTES if other != 90)]
)
@pytest.mark.parametrize(("name", "constants", "loads", "stores"), KERNELS)
def test_kernels_compile_for_a_gpu_and_move_full_vectors(
    name: str, constants: dict[str, Any], loads: int, stores: int, capability: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Compiled for A100, H100 or B200, which needs no GPU. Registers suffice without spills to memory."""
    pytest.importorskip("triton")
    from podscale.pytorch.batch_norm import fused_calls, fused_kernels, fused_pool_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, kernel = name.split(".")
    is_pool = module == "fused_pool_kernels"
    function = getattr(fused_pool_kernels if is_pool else fused_kernels, kernel)
    warps = 8 if kernel == "_pool_kernel" else fused_calls.WARPS
    types = {**TYPES, **({"squares": "i32"} if is_pool else {})}
    found = compile_kernel(function, types, constants, capability, tmp_path, warps=warps, multiples_of_16=("channels",))
    assert found.vector_loads >= loads
    assert found.vector_stores >= stores
    assert found.shared <= SHARED_MEMORY_BYTES[capability]
    assert found.registers <= REGISTERS // (32 * warps)
    assert found.spilled == 0


def images(channels: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(4, channels, 4, 4, dtype=dtype).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("change", "x", "runs"),
    [
        ({}, images(), True),
        ({}, images(dtype=torch.bfloat16), True),
        ({"is_fused": False}, images(), False),
        ({"is_frozen": True}, images(), False),
        ({"training": False}, images(), False),
        ({"part_size": 2}, images(), False),
        ({"part_size": 3}, images(), True),  # one part
        ({}, images(dtype=torch.float64), False),
        ({}, images(12), False),
        ({}, images().contiguous(), False),
    ],
)
def test_a_layer_runs_fused_where_the_kernels_apply(change: dict[str, Any], x: torch.Tensor, runs: bool) -> None:
    norm = BatchNorm(x.shape[1])
    norm.is_fused = True
    for name, value in change.items():
        setattr(norm, name, value)
    assert norm.runs_fused(x) is runs


@pytest.mark.slow
def test_a_network_of_fused_layers_equals_one_of_separate_operations() -> None:
    """Blocks with and without projection, of each kind; outputs, and gradients of all parameters."""
    assert interpret("-c", NETWORKS) == "equal"


NETWORKS = """
import torch
from podscale.config import ModelSection
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.models import build_model
from tests.support.triton_interpreter import adapt_interpreter
adapt_interpreter()
for name, block in (("resnet18", "v1"), ("resnet50", "v1"), ("resnet50", "v2")):
    section = ModelSection(name=name, width=8, block=block, zero_init_last_gamma=False)
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = build_model(section, 10).to(memory_format=torch.channels_last).train()
        layers = [module for module in model.modules() if isinstance(module, BatchNorm)]
        for layer in layers:
            layer.is_fused = fused
        x = torch.randn(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
        y = model(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters()), *(l.running_var for l in layers)])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3 * float(left.abs().max()))
print("equal")
"""


@pytest.mark.parametrize("reason", KERNEL_FAILURES)
def test_separate_operations_run_if_triton_cannot_compile(reason: str, monkeypatch: Any, caplog: Any) -> None:
    pytest.importorskip("triton")
    from podscale.pytorch.batch_norm import fused

    monkeypatch.setattr(fused, "norm", Mock(side_effect=kernel_failure(reason)))
    model = build_model(ModelSection(name="resnet18", width=8), 10)
    assert not fuse_layers.fuse_batch_norm(model, torch.device("cpu"))
    assert str(kernel_failure(reason)) in caplog.text
    assert not any(module.is_fused for module in model.modules() if isinstance(module, BatchNorm))


def test_separate_operations_run_without_triton(monkeypatch: Any) -> None:
    monkeypatch.setattr(fuse_layers, "find_spec", lambda name: None)
    assert not fuse_layers.fuse_batch_norm(nn.Sequential(BatchNorm(8)), torch.device("cpu"))
