"""Reducers average as a float64 oracle does, in worlds of 1, 2 and 4 processes."""

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from podscale.config.train import AllReduceSection
from podscale.pytorch.all_reduce import FlatAllReduce, Torus2DAllReduce
from podscale.pytorch.mesh import build_mesh
from podscale.pytorch.reducer import BucketedReducer, build_reducer, no_sync_unless_last
from podscale.pytorch.world import World

EXTRA = 3


def network(channels_last: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.Conv2d(10, 7, 3), nn.Flatten(), nn.Linear(7 * 16, 5))
    return model.to(memory_format=torch.channels_last) if channels_last else model


def data(rank: int, part: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * part + rank)
    return torch.randn(6, 3, 8, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def oracle(size: int, parts: int = 1) -> list[np.ndarray[Any, Any]]:
    """Return the mean gradient over all ranks and parts, computed in float64."""
    model = network().double()
    losses = [
        nn.functional.cross_entropy(model(images.double()), labels)
        for images, labels in (data(rank, part) for rank in range(size) for part in range(parts))
    ]
    torch.stack(losses).mean().backward()
    return [p.grad.numpy() for p in model.parameters() if p.grad is not None]


def one_step(reducer: Any, rank: int, parts: int = 1) -> list[Tensor]:
    reducer.start_step()
    for part in range(parts):
        images, labels = data(rank, part)
        with no_sync_unless_last(reducer, last=part == parts - 1):
            loss = nn.functional.cross_entropy(reducer.module(images), labels) / parts
            reducer.buffer.extra_values += torch.tensor([rank, 1.0, loss.item()])
            reducer.backward(loss, last=part == parts - 1)
    reducer.finish()
    return [g.clone() for g in reducer.buffer.views] + [reducer.buffer.extra_values.clone()]


ALGORITHMS = ("flat", "ring", "tree", "hierarchical", "torus2d", "hybrid", "ddp")
BUCKETS = [(1, False, 1), (1, True, 3), (10_000, False, 3)]
"""Bucket size in KiB, channels-last order, and passes of a step."""


def everything(world: World) -> dict[Any, list[Tensor]]:
    """Return the second step's averages by algorithm, row, bucket size, overlap, memory order and passes."""
    results = {}
    for name in ALGORITHMS:
        rows = (1, 2, 4) if name in ("hierarchical", "torus2d") else (world.size,)
        for row, overlap, (bucket_kb, channels_last, parts) in product(rows, (True, False), BUCKETS):
            if world.size % row:
                continue
            section = AllReduceSection(
                algorithm=name, row=row, bucket_mb=bucket_kb / 1024, overlap=overlap, hybrid_mb=0.001
            )
            reducer = build_reducer(section, network(channels_last), world, extra=EXTRA)
            one_step(reducer, world.rank, parts)
            results[name, row, bucket_kb, overlap, channels_last, parts] = one_step(reducer, world.rank, parts)
            reducer.close()
    return results


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_averages_equal_the_oracles_on_every_rank(run_world: Any, size: int) -> None:
    ranks = run_world(size, everything)
    expected = {parts: oracle(size, parts) for parts in (1, 3)}
    for key, values in ranks[0].items():
        *gradients, extra = values
        for gradient, expected_gradient in zip(gradients, expected[key[-1]], strict=True):
            np.testing.assert_allclose(gradient.numpy(), expected_gradient, rtol=0, atol=1e-6, err_msg=str(key))
        assert extra[0] == pytest.approx(key[-1] * (size - 1) / 2)
        assert extra[1] == key[-1]
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(values, other[key], strict=True)), key
    for key, values in ranks[0].items():
        if key[3] and key[0] != "ddp":
            without_overlap = ranks[0][(*key[:3], False, *key[4:])]
            assert all(torch.equal(a, b) for a, b in zip(values, without_overlap, strict=True)), key


def halves(world: World) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    results = {}
    for row in (1, 2, 4):
        algorithm = Torus2DAllReduce(build_mesh(world, row), world.device) if row < world.size else FlatAllReduce(world)
        bucket = torch.arange(32.0) * (world.rank + 1)
        averaged = bucket.clone()
        algorithm(averaged)
        shard = algorithm.reduce_scatter(bucket)
        gathered = torch.empty(32)
        algorithm.all_gather(shard, gathered)
        width = 32 // algorithm.shards
        assert torch.equal(shard, averaged[algorithm.shard * width : (algorithm.shard + 1) * width])
        results[row] = (averaged, shard, gathered)
    return results


def test_reduce_scatter_and_all_gather_make_up_the_all_reduce(run_world: Any) -> None:
    for row_results in run_world(4, halves):
        for averaged, _, gathered in row_results.values():
            assert torch.allclose(averaged, torch.arange(32.0) * 2.5)
            assert torch.equal(averaged, gathered)


def with_int8(world: World) -> dict[tuple[str, bool], list[Tensor]]:
    """Return averages over int8 messages, with small statistics beside a large one."""
    results = {}
    for name, is_sharded in product(("flat", "torus2d"), (False, True)):
        section = AllReduceSection(algorithm=name, row=2, wire_row="fp32", wire_column="int8", bucket_mb=0.01)
        reducer = build_reducer(section, network(), world, extra=EXTRA, sharded=is_sharded)
        reducer.start_step()
        images, labels = data(world.rank)
        reducer.buffer.extra_values += torch.tensor([1e6, 1e-3, float(world.rank)])
        reducer.backward(nn.functional.cross_entropy(reducer.module(images), labels), last=True)
        reducer.finish()
        gradients = [] if is_sharded else [g.clone() for g in reducer.buffer.views]
        results[name, is_sharded] = [*gradients, reducer.buffer.extra_values.clone()]
        reducer.close()
    return results


def test_int8_messages_leave_the_extra_values_in_fp32(run_world: Any) -> None:
    ranks = run_world(4, with_int8)
    for key, (*gradients, extra) in ranks[0].items():
        assert extra.tolist() == pytest.approx([1e6, 1e-3, 1.5], rel=1e-6), key
        for gradient, expected in zip(gradients, oracle(4), strict=not key[1]):
            np.testing.assert_allclose(gradient.numpy(), expected, rtol=0, atol=5e-3, err_msg=str(key))
        assert all(torch.equal(a, b) for other in ranks for a, b in zip(ranks[0][key], other[key], strict=True)), key


def early_reduction(world: World) -> int:
    """Return the number of buckets submitted before the last pass of a step."""
    reducer = BucketedReducer(network(), FlatAllReduce(world), world, bucket_mb=1 / 1024)
    submitted: list[Any] = []
    submit = reducer._comm_queue.submit
    reducer._comm_queue.submit = lambda average: (submitted.append(average), submit(average))[1]  # type: ignore[method-assign]
    reducer.start_step()
    images, labels = data(world.rank)
    reducer.backward(nn.functional.cross_entropy(reducer.module(images), labels), last=False)
    early = len(submitted)
    reducer.backward(nn.functional.cross_entropy(reducer.module(images), labels), last=True)
    during_backward = len(submitted)
    reducer.finish()
    assert len(submitted) == len(reducer.buffer.layout.bounds) > 3
    assert during_backward >= len(submitted) - 1, "only the bucket with `extra` may wait"
    reducer.close()
    return early


def test_accumulation_does_not_reduce_early(run_world: Any) -> None:
    assert run_world(2, early_reduction) == [0, 0]


def parameters_without_gradient(world: World) -> list[Tensor]:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    reducer = BucketedReducer(model, FlatAllReduce(world), world, bucket_mb=1e-4)
    reducer.start_step()
    reducer.backward(model["used"](torch.ones(2, 4) * (world.rank + 1)).sum(), last=True)
    reducer.finish()
    return copy.deepcopy(reducer.buffer.views)


def test_parameters_without_a_gradient_do_not_stall(run_world: Any) -> None:
    for gradients in run_world(2, parameters_without_gradient):
        assert torch.equal(gradients[0], torch.full((4, 4), 3.0))
        assert not gradients[2].any()
