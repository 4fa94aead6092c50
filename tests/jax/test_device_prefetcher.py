"""Batches on the devices, and step statuses: each device gets its own images, statuses are agreed and returned late."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from podscale.config import InputSection
from podscale.data.loaders.base import Batch
from podscale.distributed.step_status import STATUS_LAG, StepStatus
from podscale.jax.device_prefetcher import DevicePrefetcher, normalise
from podscale.jax.mesh import RANKS, SPATIAL, build_mesh
from podscale.jax.step_sync import StepSync
from podscale.jax.train_step import STATUS_SPEC, StepResults
from podscale.training.step_timer import untimed
from tests.support.standardisation import compare_standardised, standardisation_cases

SIDE, EACH = 4, 3


def batches(count: int, ranks: int) -> Iterator[Batch]:
    """Yield batches whose labels and pixels encode batch, rank and number."""
    for step in range(count):
        labels = np.arange(ranks * EACH, dtype=np.int64) + 100 * step
        images = np.broadcast_to(labels[:, None, None, None] % 256, (len(labels), SIDE, SIDE, 3)).astype(np.uint8)
        yield Batch(images, labels, labels.astype(np.uint64), np.ones(len(labels), np.float32), step)


@pytest.mark.parametrize("group", [1, 4])
def test_every_device_gets_the_batch_of_its_mesh_position(group: int) -> None:
    """A program of four batches gets three, then the remaining one."""
    mesh = build_mesh(jax.devices(), group=group)
    host_batches = list(batches(4, mesh.size))
    counts = iter([3, 4, 4])
    device_batches = list(DevicePrefetcher(mesh, 4)(iter(host_batches), untimed, lambda: next(counts)))
    assert [[source.step for source in moved.host_batches] for moved in device_batches] == [[0, 1, 2], [3]]
    for moved in device_batches:
        images, labels = moved.device_batches
        assert images.shape == (4, mesh.size * EACH, SIDE, SIDE, 3)
        for number, source in enumerate(moved.host_batches):
            np.testing.assert_array_equal(images[number], source.images)
        assert not np.asarray(images[len(moved.host_batches) :]).any()
        shards = {shard.device: shard for shard in labels.addressable_shards}
        for position, device in enumerate(mesh.devices.flat):
            mine = slice(position * EACH, (position + 1) * EACH)
            np.testing.assert_array_equal(shards[device].data[0], moved.host_batches[0].labels[mine])


@pytest.mark.parametrize("parts", [(1, 1), (2, 2)])
def test_standardised_images_have_their_own_mean_and_deviation(parts: tuple[int, int]) -> None:
    """Also if devices have tiles of an image, whose mean is that of all tiles."""
    images, section = standardisation_cases(), InputSection(per_image_standardization=True)
    mesh = build_mesh(jax.devices()[: parts[0] * parts[1]], parts=parts)
    tiled = jax.sharding.PartitionSpec(None, *SPATIAL)
    program = jax.shard_map(lambda tiles: normalise(tiles, section, parts), mesh=mesh, in_specs=tiled, out_specs=tiled)
    found = jax.jit(program)(images)
    assert found.dtype == np.float32
    compare_standardised(np.asarray(found), images)


def step_results(losses: list[float], finite: list[bool], status: Any, norm: bool = True) -> StepResults:
    values = jax.numpy.asarray(losses)
    return StepResults(values, jax.numpy.asarray(finite), values * 10 if norm else None, status)


def test_statuses_are_agreed_and_returned_late() -> None:
    mesh = build_mesh(jax.devices())
    control = StepSync(mesh, rank=5, local_ranks=mesh.size)
    agree = jax.jit(
        jax.shard_map(
            lambda statuses: jax.lax.pmax(statuses[0], RANKS),
            mesh=mesh,
            in_specs=STATUS_SPEC,
            out_specs=jax.sharding.PartitionSpec(),
        )
    )
    calm, asked = (
        control.local_status(stop=False, busy_seconds=0.25),
        control.local_status(stop=True, busy_seconds=0.125),
    )
    assert control.local_status(stop=True, busy_seconds=0.125) is asked
    control.send(0, 2, step_results([1.5, 2.5, 0.0], [True, False, False], agree(calm)))
    assert control.ready() == []
    for call in range(STATUS_LAG):
        control.send(2 + call, 1, step_results([3.5], [True], agree(asked), norm=False))
    assert control.ready() == [
        StepStatus(1, False, True, 1.5, 5, 250, 250, grad_norm=15.0),
        StepStatus(2, False, False, 2.5, 5, 250, 250, grad_norm=25.0),
    ]
    assert control.ready() == []
    assert control.drain() == [StepStatus(step, True, True, 3.5, 5, 125, 125) for step in (3, 4)]


def test_a_status_names_the_slowest_rank_and_any_rank_may_request_a_stop() -> None:
    """Two processes with four devices each and different statuses."""
    mesh = build_mesh(jax.devices())
    statuses = [
        np.asarray(StepSync(mesh, rank, local_ranks=mesh.size).local_status(stop=rank == 1, busy_seconds=busy))
        for rank, busy in ((0, 0.04), (1, 0.02))
    ]
    control = StepSync(mesh, 0, local_ranks=mesh.size)
    agreed = np.max([statuses[position // 4][position] for position in range(8)], axis=0)
    control.send(7, 1, step_results([1.0], [True], jax.numpy.asarray(agreed)))
    assert control.drain() == [StepStatus(8, True, True, 1.0, 0, 40, 20, grad_norm=10.0)]


def test_more_batches_than_a_program_takes_are_an_error() -> None:
    mesh = build_mesh(jax.devices())
    with pytest.raises(AssertionError, match=r"2 .* 1"):
        next(DevicePrefetcher(mesh)(batches(2, mesh.size), untimed, lambda: 2))
