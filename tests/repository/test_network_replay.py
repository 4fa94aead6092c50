"""Parts of the network benchmark that need no network: replayed steps and the arithmetic of the claims."""

import time

import pytest
import torch

from benchmarks.network import claims
from benchmarks.network.netns_cluster import ClusterShape
from benchmarks.network.replay import ReplayedModel, StepTrace, split_gradients
from benchmarks.network.setting import bound


def test_gradients_come_in_the_order_and_not_before_the_times_of_the_trace() -> None:
    shapes = (torch.Size([3]), torch.Size([2, 2]), torch.Size([5]))
    model = ReplayedModel(StepTrace(shapes, (0.06, 0.04, 0.01), forward=0.02), 2.5)
    arrivals: list[tuple[int, float]] = []
    backward_start = 0.0
    for number, parameter in enumerate(model.tensors):
        parameter.register_post_accumulate_grad_hook(
            lambda p, number=number: arrivals.append((number, time.perf_counter() - backward_start))  # type: ignore[misc]
        )
    start = time.perf_counter()
    loss = model(torch.zeros((), requires_grad=True))
    backward_start = time.perf_counter()
    assert backward_start - start >= 0.02
    loss.backward()
    assert [number for number, _ in arrivals] == [2, 1, 0]
    assert all(seconds >= at for (_, seconds), at in zip(arrivals, (0.01, 0.04, 0.06), strict=True))
    for parameter, shape in zip(model.parameters(), shapes, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.shape == shape
        assert parameter.grad.eq(2.5).all()


def test_split_gradients_have_all_the_bytes() -> None:
    trace = split_gradients(10_000_000, largest=2**20)
    assert trace.bytes == 10_000_000
    assert max(shape.numel() for shape in trace.shapes) == 2**20


def test_bound_of_two_nodes_of_four() -> None:
    shape = ClusterShape(2, 4, 100e6, 25e6)
    assert bound(shape, 100.0) == pytest.approx(4.0)  # 100 MB each way between the nodes
    assert bound(ClusterShape(2, 4, 100e6, 400e6), 100.0) == pytest.approx(2 * 7 / 8)  # the ranks' own links


def test_claims_count_every_gradient_once() -> None:
    assert [sum(sizes) for sizes in claims.NETWORKS.values()] == [243_868_448, 4 * 25_557_032]
    assert len(claims.NETWORKS["ResNet-50"]) == 161
    for sizes in claims.NETWORKS.values():
        buckets = claims.buckets(sizes)
        assert sum(buckets) == sum(sizes)
        assert all(size <= max(claims.BUCKET, *sizes) for size in buckets)


def test_measured_fabric_at_a_thousand_ranks_keeps_its_links() -> None:
    from podscale.hardware.collective_cost import Fabric, LinkAxis

    card = 1 / 25e6
    fabric = claims.at_scale(Fabric(LinkAxis(4, 1e-4, 1e-8), LinkAxis(2, 1e-3, 4 * card), LinkAxis(8, 3e-4, card)))
    assert (fabric.row.ranks, fabric.column.ranks, fabric.world.ranks) == (16, 64, 1024)
    assert fabric.column.per_byte == pytest.approx(16 * card)  # sixteen ranks share the card that four shared
    assert fabric.world.per_byte == pytest.approx(card)
    assert 1e-4 < fabric.world.latency < 2e-4
