"""Fused batch norm on a CUDA device equals torch in float64, and a network trains alike with and without it."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SHAPES = (
    (3, 8, 6, 4),
    (2, 24, 10, 14),
    (1, 320, 2, 6),
    (16, 64, 112, 112),
    (16, 256, 56, 56),
    (16, 2048, 7, 7),
)
"""The last three are layers of ResNet-50."""
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}


@pytest.fixture(autouse=True)
def _device(world: Any) -> None:
    """Skip without a CUDA device."""


@pytest.mark.parametrize("kind", ["norm", "relu", "sum", "pool"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_fused_layer_equals_float64(kind: str, shape: tuple[int, ...], dtype: str) -> None:
    import torch

    from tests.support.fused_norm_oracle import errors_of

    if kind == "pool" and (shape[2] % 2 or shape[3] % 2):
        pytest.skip("pooling is fused for even sides")
    errors = errors_of(kind, shape, getattr(torch, dtype), device="cuda")
    assert all(error < TOLERANCE[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("kind", ["relu", "sum", "pool"])
def test_a_group_of_ranks_equals_float64(world: Any, kind: str) -> None:
    import torch

    from tests.support.fused_norm_oracle import errors_of

    errors = errors_of(kind, (2, 24, 10, 14), torch.float32, world.consecutive_group(1), device="cuda")
    assert all(error < TOLERANCE["float32"] for error in errors.values()), errors


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_network_trains_as_with_separate_operations(
    make_shard_set: Any, document: Any, train_here: Any, tmp_path: Path, name: str, cuda_graph: bool
) -> None:
    shards, model = make_shard_set(), {"name": name, "width": 16}
    states = []
    for fused in ("norm", "off"):
        config = document(
            tmp_path / fused,
            model=model,
            size=64,
            fused_kernels=fused,
            cuda_graph=cuda_graph,
            epochs=2,
            schedule={"learning_rate": 0.01},
        )
        states.append(train_here(config, shards))
    for key, expected in states[1].items():
        if key.startswith("model/"):
            error = (states[0][key].double() - expected.double()).abs().max().item()
            assert error < 2e-3 * (expected.abs().max().item() + 1e-3), key


def test_two_runs_of_fused_steps_give_the_same_bits(
    make_shard_set: Any, document: Any, train_here: Any, tmp_path: Path
) -> None:
    import torch

    shards, model = make_shard_set(), {"name": "resnet50", "width": 16}
    first, second = (
        train_here(document(tmp_path / run, model=model, size=64, fused_kernels="norm", cuda_graph=True), shards)
        for run in ("first", "second")
    )
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_choice_is_made_on_the_gpu_and_kept(document: Any, world: Any, tmp_path: Path) -> None:
    from podscale.pytorch.kernel_choice import choose_kernels
    from podscale.pytorch.stored_choice import StoredChoice

    config = document(
        tmp_path, model={"name": "resnet50", "width": 16}, size=64, precision="bf16", fused_kernels="auto"
    )
    stored = StoredChoice(tmp_path / "fused_kernels.json")
    chosen, seconds, is_kept = choose_kernels(config, world, 4, stored)
    print(f"{chosen}: {seconds}")
    assert seconds.keys() == {"off", "norm", "gemm"}
    assert not is_kept
    assert choose_kernels(config, world, 4, stored) == (chosen, seconds, True)
