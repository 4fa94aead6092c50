"""Replica group: it gathers by the collective that this torch does not deprecate."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from podscale.pytorch.optim.base import build_replica_group
from podscale.pytorch.world import World


@pytest.fixture
def world() -> Iterator[World]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield World(0, 4, 0, 4, torch.device("cpu"))
    dist.destroy_process_group()


def test_vectors_are_gathered_without_a_warning(world: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gathered = build_replica_group(world).all_gather(torch.arange(3.0))
    assert gathered.shape == (12,)
    assert gathered[:3].tolist() == [0.0, 1.0, 2.0]
