"""Replica group: it gathers by the collective that this torch does not deprecate."""

from collections.abc import Iterator
from typing import Any

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


def test_vectors_are_gathered_by_the_name_that_is_not_deprecated(world: World, monkeypatch: Any) -> None:
    """From 2.13 on, `all_gather_into_tensor` is an alias for old code."""
    if not hasattr(dist, "all_gather_single"):
        pytest.skip("this torch has the older name only")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("deprecated")

    monkeypatch.setattr(dist, "all_gather_into_tensor", refuse)
    gathered = build_replica_group(world).all_gather(torch.arange(3.0))
    assert gathered.shape == (12,)
    assert gathered[:3].tolist() == [0.0, 1.0, 2.0]
