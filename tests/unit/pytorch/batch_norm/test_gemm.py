"""1x1 convolutions with batch norm: results against float64, the code for GPUs, and where the kernels apply."""

import json
import logging
import re
from pathlib import Path
from typing import Any

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
    TENSOR_CORE_PRODUCTS,
    CompiledKernel,
    compile_kernel,
    interpret,
    kernel_failure,
)

FP32_ERROR, BF16_ERROR = 2e-6, 0.02


def is_exact(case: str, error: float) -> bool:
    return error < (BF16_ERROR if case.endswith("convolution in bf16") else FP32_ERROR)


@pytest.mark.slow
def test_results_equal_float64() -> None:
    """Outputs, gradients, running statistics, with and without a group; moments are those of the rounded outputs.

    By tensor descriptors they have the bits that they have by pointers.
    """
    errors = json.loads(interpret("-m", "tests.support.gemm_oracle"))
    assert len(errors) == 25
    assert all(is_exact(*error) for error in errors.items()), errors


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_of_unequal_batches_equal_float64() -> None:
    errors = json.loads(interpret("-m", "tests.support.gemm_ranks"))
    assert len(errors) == 2
    assert all(error < FP32_ERROR for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_network_equals_one_of_separate_operations() -> None:
    """Bottleneck blocks, their pre-activated form, and projections of basic blocks, beside float64."""
    assert interpret("-c", NETWORKS) == "equal"


NETWORKS = """
import torch
from unittest import mock
from podscale.config import ModelSection
from podscale.models import resnet
from podscale.pytorch.batch_norm import BatchNorm, gemm_calls
from podscale.pytorch.models import build_model
from tests.support.gemm_oracle import norm_error, prepare_interpreter
prepare_interpreter()
BLOCKS = {"resnet50": ("bottleneck", (2, 2, 1)), "resnet18": ("basic", (1, 1, 1))}
for name, block, convolutions in (("resnet50", "v1", 13), ("resnet50", "v2", 10), ("resnet18", "v1", 2)):
    section = ModelSection(name=name, width=16, block=block, zero_init_last_gamma=False)
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        with mock.patch.dict(resnet.IMAGENET_BLOCKS, BLOCKS):
            model = build_model(section, 10).to(memory_format=torch.channels_last).train()
        layers = [module for module in model.modules() if isinstance(module, BatchNorm)]
        for layer in layers:
            layer.is_fused = layer.folds_convolutions = fused
        model = model if fused else model.double()
        x = torch.randn(4, 3, 64, 64).contiguous(memory_format=torch.channels_last)
        with mock.patch.object(gemm_calls, "_launch_forward", wraps=gemm_calls._launch_forward) as kernel:
            y = model(x if fused else x.double())
            y.square().sum().backward()
        assert kernel.call_count == (convolutions if fused else 0), kernel.call_count
        results.append([y.detach(), *(p.grad for p in model.parameters()), *(l.running_var for l in layers)])
    errors = [norm_error(found, exact) for exact, found in zip(*results, strict=True)]
    assert max(errors) < 0.01, max(errors)  # a sign that differs before a ReLU is one of thousands
print("equal")
"""

IMAGES = ("x", "weight", "y", "shortcut", "gradient", "second_gradient", "dx")
SIZES = "rows inputs outputs channels chunk columns tiles height width full_height full_width elements splits"
TYPES = {**dict.fromkeys(IMAGES, "*bf16"), "bits": "*u8", **dict.fromkeys(SIZES.split(), "i32")}
TILE = {"block_rows": 128, "block_inputs": 64, "block_outputs": 128}
SPLIT = {"block_rows": 64, "block_inputs": 128, "block_outputs": 128}
FORWARD, DATA, WEIGHT = "_gemm_forward_kernel", "_gemm_data_gradient_kernel", "_gemm_weight_gradient_kernel"
QUICK = [
    (FORWARD, {"activation": 2, "stride": 1, **TILE, "block_inputs": 32}, 10),
    (DATA, {"relu": 2, "stride": 1, "second_stride": 1, **TILE}, 8),
]
DESCRIBED = {
    FORWARD: {
        "x": ("block_rows", "block_inputs"),
        "weight": ("block_outputs", "block_inputs"),
        "y": ("block_rows", "block_outputs"),
    },
    DATA: {
        "gradient": ("block_rows", "block_inputs"),
        "weight": ("block_inputs", "block_outputs"),
        "dx": ("block_rows", "block_outputs"),
    },
    WEIGHT: {"gradient": ("block_rows", "block_outputs"), "x": ("block_rows", "block_inputs")},
}
"""Sides of the tiles of a kernel's tensor descriptors, by argument."""
KERNELS = [
    (FORWARD, {"activation": 0, "stride": 1, **TILE}, 8),
    (FORWARD, {"activation": 0, "stride": 2, **TILE}, 8),
    (FORWARD, {"activation": 1, "stride": 1, **TILE}, 8),
    (FORWARD, {"activation": 1, "stride": 1, **TILE, "block_outputs": 64}, 4),
    (FORWARD, {"activation": 2, "stride": 1, **TILE, "block_inputs": 32, "block_outputs": 64}, 6),
    (DATA, {"relu": 0, "stride": 1, "second_stride": 0, **TILE}, 8),
    (DATA, {"relu": 0, "stride": 2, "second_stride": 0, **TILE}, 8),
    (DATA, {"relu": 1, "stride": 1, "second_stride": 0, **TILE}, 8),
    (DATA, {"relu": 1, "stride": 1, "second_stride": 0, **TILE, "block_outputs": 64}, 4),
    (DATA, {"relu": 2, "stride": 1, "second_stride": 0, **TILE}, 8),
    (DATA, {"relu": 2, "stride": 1, "second_stride": 2, **TILE}, 8),
    (WEIGHT, {"activated": False, "stride": 1, **SPLIT}, 16),
    (WEIGHT, {"activated": True, "stride": 1, **SPLIT}, 16),
    (WEIGHT, {"activated": False, "stride": 2, **SPLIT}, 16),
    ("_gemm_merge_kernel", {"moments": True, "tile_rows": 128, "block_tiles": 64, "block_channels": 64}, 0),
    ("_gemm_merge_kernel", {"moments": False, "tile_rows": 128, "block_tiles": 64, "block_channels": 64}, 0),
    ("_gemm_add_splits_kernel", {"block": 1024}, 0),
]
"""Kernels with constants, and the least number of vectors that a thread stores."""
BY_DESCRIPTORS = [
    (FORWARD, {"activation": 0, "stride": 1, **TILE}),
    (FORWARD, {"activation": 1, "stride": 1, **TILE}),
    (FORWARD, {"activation": 1, "stride": 1, **TILE, "block_outputs": 64}),
    (FORWARD, {"activation": 2, "stride": 1, **TILE, "block_inputs": 32}),
    (DATA, {"relu": 0, "stride": 1, "second_stride": 0, **TILE}),
    (DATA, {"relu": 1, "stride": 1, "second_stride": 0, **TILE}),
    (DATA, {"relu": 2, "stride": 1, "second_stride": 2, **TILE}),
    (WEIGHT, {"activated": False, "stride": 1, **SPLIT}),
    (WEIGHT, {"activated": True, "stride": 1, **SPLIT}),
]
SPILLED_BYTES = 16
"""Allowed for each thread: ptxas takes 128 registers for an activated input on sm_80, so that two programs fit."""
OTHERS = [(*kernel, capability) for capability in SHARED_MEMORY_BYTES for kernel in KERNELS + QUICK]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS if case[:3] not in QUICK or case[3] != 90]


@pytest.mark.parametrize(("name", "constants", "stores", "capability"), [*((*kernel, 90) for kernel in QUICK), *SLOW])
def test_kernels_compile_for_a_gpu(
    name: str, constants: dict[str, Any], stores: int, capability: int, tmp_path: Any, monkeypatch: Any
) -> None:
    """Compiled for A100, H100 or B200, which needs no GPU: full vectors, tensor cores, no spills to memory."""
    pytest.importorskip("triton")
    from podscale.pytorch.batch_norm import gemm_calls

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compile_gemm(name, constants, capability, tmp_path)
    assert found.vector_stores >= stores
    if "block_inputs" in constants:
        assert found.vector_copies >= 8
        assert TENSOR_CORE_PRODUCTS[capability] in found.ptx
    assert found.shared <= SHARED_MEMORY_BYTES[capability]
    assert found.registers <= REGISTERS // (32 * gemm_calls.WARPS)
    assert found.spilled <= SPILLED_BYTES


def compile_gemm(
    name: str, constants: dict[str, Any], capability: int, folder: Path, *, descriptors: bool = False
) -> CompiledKernel:
    from podscale.pytorch.batch_norm import gemm_calls, gemm_kernels

    types = {**TYPES, **({"activated": "*bf16"} if "activation" in constants else {})}
    if name in DESCRIBED:
        constants = {**constants, "descriptors": descriptors}
    if descriptors:
        sides = {argument: [constants[side] for side in tile] for argument, tile in DESCRIBED[name].items()}
        types |= {argument: f"tensordesc<bf16{tile}>" for argument, tile in sides.items()}
    return compile_kernel(
        getattr(gemm_kernels, name),
        types,
        constants,
        capability,
        folder,
        warps=gemm_calls.WARPS,
        stages=gemm_calls.STAGES,
        multiples_of_16=("inputs", "outputs", "channels"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("name", "constants"), BY_DESCRIPTORS)
def test_tensor_descriptors_move_tiles_by_the_tensor_memory_accelerator(
    name: str, constants: dict[str, Any], capability: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Both factors, and the result if it is images."""
    pytest.importorskip("triton")
    from podscale.pytorch.batch_norm import gemm_calls

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plain, found = (compile_gemm(name, constants, capability, tmp_path, descriptors=by) for by in (False, True))
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", found.ptx)) >= 2
    assert ("cp.async.bulk.tensor.2d.global" in found.ptx) is (name != WEIGHT)
    assert not re.findall(r"cp\.async\.bulk\.tensor", plain.ptx)
    assert TENSOR_CORE_PRODUCTS[capability] in found.ptx
    assert found.spilled == 0
    assert found.shared <= SHARED_MEMORY_BYTES[capability]
    assert found.registers <= REGISTERS // (32 * gemm_calls.WARPS)
    specialised = capability == 100 and constants.get("activation") != 2
    assert ("setmaxnreg" in found.ptx) is specialised, "warps of their own load the tiles"


def images(channels: int = 32, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(4, channels, 4, 4, dtype=dtype).contiguous(memory_format=torch.channels_last)


def pointwise(inputs: int = 32, outputs: int = 64, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, **{"kernel_size": 1, "bias": False, **options})


class OtherConv(nn.Conv2d):
    """Convolution with a forward pass of its own, such as one that blurs first."""


@pytest.mark.parametrize(
    ("change", "conv", "x", "runs"),
    [
        ({}, pointwise(), images(), True),
        ({}, pointwise(), images(dtype=torch.float16), True),
        ({}, pointwise(stride=2), images(), True),
        ({"folds_convolutions": False}, pointwise(), images(), False),
        ({"is_frozen": True}, pointwise(), images(), False),
        ({"training": False}, pointwise(), images(), False),
        ({"part_size": 2}, pointwise(), images(), False),
        ({}, pointwise(), images(dtype=torch.float32), False),
        ({}, pointwise(), images().contiguous(), False),
        ({}, pointwise(inputs=24), images(24), False),
        ({}, pointwise(outputs=24), images(), False),
        ({}, pointwise(bias=True), images(), False),
        ({}, pointwise(groups=2), images(), False),
        ({}, pointwise(stride=(1, 2)), images(), False),
        ({}, pointwise(padding=1), images(), False),
        ({}, pointwise(kernel_size=3, padding=1), images(), False),
        ({}, OtherConv(32, 64, 1, bias=False), images(), False),
    ],
)
def test_a_convolution_runs_as_a_product_where_the_kernels_apply(
    change: dict[str, Any], conv: nn.Module, x: torch.Tensor, runs: bool
) -> None:
    norm = BatchNorm(x.shape[1])
    norm.is_fused = norm.folds_convolutions = True
    for name, value in change.items():
        setattr(norm, name, value)
    assert norm.folds(conv, x) is runs


@pytest.mark.parametrize(
    ("error", "folds", "message"),
    [
        (0.01, True, ""),
        (0.4, False, "their relative error is 0.4"),
        (float("nan"), False, "their relative error is nan"),
        *((reason, False, "Triton cannot compile them") for reason in KERNEL_FAILURES),
    ],
)
def test_wrong_or_missing_kernels_are_not_used(
    error: Any, folds: bool, message: str, monkeypatch: Any, caplog: Any
) -> None:
    """Batch norm stays fused."""
    pytest.importorskip("triton")
    from podscale.pytorch.batch_norm import fused, gemm_check

    def largest_error(*arguments: Any) -> float:
        if isinstance(error, str):
            raise kernel_failure(error)
        return float(error)

    monkeypatch.setattr(fused, "norm", lambda layer, x: x)
    monkeypatch.setattr(gemm_check, "largest_error", largest_error)
    model = build_model(ModelSection(name="resnet50", width=16), 10)
    with caplog.at_level(logging.WARNING):
        assert fuse_layers.fuse_batch_norm(model, torch.device("cpu"), convolutions=True)
    layers = [module for module in model.modules() if isinstance(module, BatchNorm)]
    assert all(module.is_fused and module.folds_convolutions is folds for module in layers)
    assert message in caplog.text
    assert bool(caplog.text) is not folds
    assert fuse_layers.gemm_load_facts(model) == ({"loads": "pointers"} if folds else {})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_check_before_a_training_passes_and_finds_a_fault() -> None:
    errors = json.loads(interpret("-c", CHECK))
    assert errors[0] < 0.1
    assert errors[1] > 0.2


CHECK = """
import json
import torch
from podscale.pytorch.batch_norm import gemm_check
from tests.support.kernel_mutants import MUTANTS, planted
from tests.support.triton_interpreter import adapt_interpreter
adapt_interpreter()
device = torch.device("cpu")
errors = [gemm_check.largest_error(device, [gemm_check.SMALL])]
with planted(MUTANTS["gemm"]["bits in the wrong order"]):
    errors.append(gemm_check.largest_error(device, [gemm_check.SMALL]))
print(json.dumps(errors))
"""
