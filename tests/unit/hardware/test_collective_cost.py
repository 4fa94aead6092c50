"""The cost model of collectives: against published figures, against bounds, and its fit and choice."""

import math

import pytest

from benchmarks.network.nccl_model import NcclCluster, nccl_best_seconds
from podscale.hardware.collective_cost import (
    ALGORITHMS,
    Fabric,
    LinkAxis,
    bandwidth_bound,
    choose_all_reduce,
    crossover_bytes,
    fit_affine_cost,
    fit_link_axis,
    flat,
    hierarchical,
    torus2d,
)

NAMES = ("flat", "tree", "hierarchical", "torus2d")


def cluster(nodes: int, ranks: int, rank_rate: float, node_rate: float, latency: float = 0.0) -> Fabric:
    """Fabric of links with these rates, bytes/s: one per rank, and one network card that the ranks of a node share."""
    slowest = min(rank_rate, node_rate) if nodes > 1 else rank_rate
    return Fabric(
        LinkAxis(ranks, latency, 1 / rank_rate),
        LinkAxis(nodes, latency, max(1 / rank_rate, ranks / node_rate)),
        LinkAxis(nodes * ranks, latency, 1 / slowest),
    )


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (128, 8), (1, 8), (8, 1)])
@pytest.mark.parametrize("ratio", [1, 4, 16])
@pytest.mark.parametrize("name", NAMES)
def test_no_algorithm_beats_the_bound(name: str, shape: tuple[int, int], ratio: int) -> None:
    fabric = cluster(*shape, ratio * 1e8, 1e8)
    for size in (1e6, 102e6):
        assert ALGORITHMS[name](fabric, size) >= 0.999 * bandwidth_bound(size, *shape, ratio * 1e8, 1e8)


def test_ring_and_torus_by_hand() -> None:
    fabric = Fabric(LinkAxis(4, 1e-5, 1e-9), LinkAxis(2, 1e-4, 8e-9), LinkAxis(8, 2e-5, 3e-9), max_slices=1)
    size = 8e6
    assert flat(fabric, size) == pytest.approx(14 * 2e-5 + 2 * 7 / 8 * size * 3e-9)
    row, column = 3 * 1e-5 + 3 / 4 * size * 1e-9, 2 * 1e-4 + size / 4 * 8e-9
    assert torus2d(fabric, size) == pytest.approx(row + column + row)
    assert hierarchical(fabric, size) == pytest.approx(6 * 1e-5 + 2 * size * 1e-9 + 2 * 1e-4 + size * 3e-9)


def test_slices_hide_the_rows_behind_the_column() -> None:
    fabric = cluster(2, 4, 4e8, 1e8)
    size = 51e6
    bound = bandwidth_bound(size, 2, 4, 4e8, 1e8)
    assert bound < torus2d(fabric, size) < 1.1 * bound
    whole = Fabric(fabric.row, fabric.column, fabric.world, max_slices=1)
    assert torus2d(whole, size) > 1.3 * bound


@pytest.mark.parametrize(
    ("gpus", "p40", "h100"), [(16, 8.34, 0.39), (64, 9.97, 0.61), (256, 14.98, 1.45), (1024, 19.47, 4.77)]
)
def test_nccl_ring_of_51_mb(gpus: int, p40: float, h100: float) -> None:
    """Milliseconds of a ring by an independent re-implementation of the model of NCCL 2.30.7."""
    nodes = gpus // 8
    old = NcclCluster(nodes, 8, "pci", 10, 12, 20.4, 61)
    new = NcclCluster(nodes, 8, "nvlink", 370, 330, 35, 90)
    assert nccl_best_seconds(old, "ring", 51e6) * 1e3 == pytest.approx(p40, rel=0.01)
    assert nccl_best_seconds(new, "ring", 51e6) * 1e3 == pytest.approx(h100, rel=0.03)


@pytest.mark.parametrize(("gpus", "p40", "h100"), [(1024, 13.46, 0.55), (2048, 13.49, 0.57)])
def test_nccl_tree_of_51_mb(gpus: int, p40: float, h100: float) -> None:
    nodes = gpus // 8
    assert nccl_best_seconds(NcclCluster(nodes, 8, "pci", 10, 12, 20.4, 61), "tree", 51e6) * 1e3 == pytest.approx(
        p40, 0.01
    )
    assert nccl_best_seconds(NcclCluster(nodes, 8, "nvlink", 370, 330, 35, 90), "tree", 51e6) * 1e3 == pytest.approx(
        h100, 0.02
    )


def test_fit_finds_the_links_that_made_the_times() -> None:
    axis, sizes = LinkAxis(4, 3e-5, 2e-9), [2**10, 2**14, 2**18, 2**22]
    fitted = fit_link_axis(4, sizes, [axis.all_reduce()(size) for size in sizes])
    assert fitted == pytest.approx(axis, rel=1e-9)


def test_fit_is_never_negative() -> None:
    assert fit_affine_cost([1000, 2000, 4000], [1.0, 2.0, 4.1]).fixed == 0.0
    level = fit_affine_cost([1000, 2000, 4000], [2.0, 1.9, 1.8])
    assert level == (1.8, 1.8 / 4000), "the rate of the largest message is a lower bound"
    alone = fit_link_axis(1, (), ())
    assert alone.all_reduce()(1e9) == 0.0


def test_choice_follows_the_links() -> None:
    size = 102_228_128
    unequal = choose_all_reduce(cluster(2, 4, 1e9, 1e8, 1e-5), size, NAMES)
    assert unequal.algorithm == "torus2d"
    equal = choose_all_reduce(cluster(1, 8, 1e9, 1e9, 1e-5), size, NAMES)
    assert equal.algorithm == "flat"
    far = choose_all_reduce(cluster(128, 8, 1e10, 1e10, 1e-2), size, NAMES)
    assert far.algorithm in ("tree", "hierarchical", "torus2d")
    assert far.bucket_mb > unequal.bucket_mb  # latency asks for few, large buckets


def test_the_choice_is_allowed_and_no_more_complex_than_needed() -> None:
    fabric = cluster(2, 4, 1e9, 1e8, 1e-5)
    assert choose_all_reduce(fabric, 10**8, ("flat", "hierarchical")).algorithm == "hierarchical"
    assert choose_all_reduce(fabric, 10**8, ("torus2d",)).algorithm == "torus2d"
    almost = Fabric(LinkAxis(2, 0, 1e-9), LinkAxis(1, 0, 0), LinkAxis(2, 0, 1.02e-9))
    assert choose_all_reduce(almost, 10**8, ("flat", "torus2d")).algorithm == "flat"


def test_half_the_bytes_take_half_the_time() -> None:
    fabric = cluster(2, 4, 1e9, 1e8)
    assert torus2d(fabric.with_wire_formats(0.5, 0.5), 1e8) == pytest.approx(torus2d(fabric, 1e8) / 2)
    assert flat(fabric.with_wire_formats(1.0, 0.5), 1e8) == pytest.approx(flat(fabric, 1e8) / 2)


def test_jia_threshold_lies_where_latency_and_bandwidth_balance() -> None:
    fabric = cluster(64, 16, 1e10, 1e10, 1e-5)
    size = crossover_bytes(fabric, hierarchical, flat)
    assert math.isfinite(size)
    assert flat(fabric, size / 4) > hierarchical(fabric, size / 4)
    assert flat(fabric, size * 4) < hierarchical(fabric, size * 4)
