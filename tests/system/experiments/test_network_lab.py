"""Emulated cluster of the network benchmark: traffic passes the shaped links, and nothing is left behind.

Needs root and the tools of iproute2; skips otherwise.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network.measurement import measure, run_ranks
from benchmarks.network.netns_cluster import (
    NAMESPACES,
    PREFIX,
    ClusterShape,
    NetnsCluster,
    clean_up,
    netns_cluster,
    unavailable_reason,
)
from podscale.pytorch.world import World

MB = 10**6
SHAPE = ClusterShape(2, 2, 400 * MB, 40 * MB)


@pytest.fixture(autouse=True)
def _needs_namespaces() -> Iterator[None]:
    if reason := unavailable_reason():
        pytest.skip(reason)
    yield
    assert mine(os.getpid()) == []


def mine(pid: int) -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"{PREFIX}{pid}-*"))


def reduce_on_both_axes(world: World, cluster: NetnsCluster) -> dict[str, Any]:
    """All-reduce 4 MB in the node, then across nodes."""
    import torch
    from torch import distributed as dist

    from podscale.pytorch.mesh import build_mesh

    mesh, data = build_mesh(world), torch.full((MB,), float(world.rank))
    results = {}
    for name, axis in (("row", mesh.row), ("column", mesh.column)):
        dist.all_reduce(torch.zeros(8), group=axis.group)  # connections
        results[name] = measure(world, cluster, lambda axis=axis: dist.all_reduce(data, group=axis.group), 1)
    results["mean"] = float(data[-1]) / world.size
    return results


@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_traffic_between_nodes_passes_the_slow_link(delay: float) -> None:
    with netns_cluster(ClusterShape(2, 2, SHAPE.rank_rate, SHAPE.node_rate, delay)) as cluster:
        results = run_ranks(cluster, reduce_on_both_axes, cluster, seconds=120.0)[0]
        assert len(mine(os.getpid())) == 1 + 2 + 4
    assert results["mean"] == 1.5
    row, column = results["row"], results["column"]
    size = 4 * MB
    assert row.node_bytes < 0.01 * size, "inside a node nothing passes the link between nodes"
    assert 1.0 * size < row.rank_bytes < 1.05 * size
    assert 2.0 * size < column.node_bytes < 2.1 * size, "both ranks of a node send 4 MB to the other node"
    assert column.median > 0.95 * (2 * size - 2**16) / SHAPE.node_rate, "no faster than the link allows"


def test_a_failing_rank_ends_the_others_and_the_lab() -> None:
    def body(world: World) -> None:
        if world.rank == 1:
            raise ValueError("of all things")
        world.barrier()

    with pytest.raises(RuntimeError, match="of all things"), netns_cluster(SHAPE) as cluster:
        run_ranks(cluster, body)


PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored
from benchmarks.network.netns_cluster import ClusterShape, netns_cluster
with netns_cluster(ClusterShape(2, 1, 1e8, 1e7, 0.001)) as cluster:
    print(cluster.namespaces[0], flush=True)
    time.sleep(60)
"""


def test_what_a_killed_owner_left_is_removed_by_the_next() -> None:
    owner = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, cwd=_root())
    assert owner.stdout is not None
    assert owner.stdout.readline().startswith(f"{PREFIX}{owner.pid}-")
    leftovers = mine(owner.pid)
    assert len(leftovers) == 1 + 2 + 2
    assert clean_up() == [], "networks of a running owner are not touched"
    assert mine(owner.pid) == leftovers
    wires = _processes_in(leftovers)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert mine(owner.pid) == leftovers
    assert clean_up() == leftovers
    assert mine(owner.pid) == []
    assert len(wires) == 2, "one process for each delayed node link"
    assert _soon(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in wires))


def test_an_ordinary_end_and_an_interrupt_leave_nothing() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=_root(),
    )
    assert owner.stdout is not None
    owner.stdout.readline()
    owner.send_signal(signal.SIGINT)
    owner.wait(30)
    assert mine(owner.pid) == []


def _root() -> Path:
    return Path(__file__).resolve().parents[3]


def _processes_in(namespaces: list[str]) -> list[str]:
    processes: list[str] = []
    for name in namespaces:
        processes += subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        ).stdout.split()
    return processes


def _soon(condition: Any, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())
