"""Mesh: rows along the torus, slices as an axis, batch-norm groups of neighbours."""

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from podscale.config import RunConfig
from podscale.distributed.worker_env import RankEnv
from podscale.jax.mesh import (
    COLUMN,
    DEVICES,
    GROUP,
    ROW,
    DevicePosition,
    arrange_devices,
    axis_size,
    build_mesh,
    device_position,
    mesh_for_config,
    plan_grid,
    plan_partition,
    plan_tile,
)
from podscale.jax.world import _check_slice
from tests.support.refusals import refused


def torus(x: int, y: int, z: int = 1, *, cores: int = 1, slices: int = 1) -> list[DevicePosition]:
    """Return the positions of a machine's devices, in random order."""
    places = [
        DevicePosition(s, i, j, k, c)
        for s in range(slices)
        for k in range(z)
        for j in range(y)
        for i in range(x)
        for c in range(cores)
    ]
    return [places[number] for number in np.random.default_rng(0).permutation(len(places))]


def placed(places: list[DevicePosition]) -> list[list[list[tuple[int, ...]]]]:
    return [[[tuple(places[n]) for n in row] for row in part] for part in plan_grid(places).tolist()]


def test_rows_lie_along_the_torus_with_the_cores_of_a_chip_side_by_side() -> None:
    rows = placed(torus(4, 4, cores=2))[0]  # v3:4x4
    assert len(rows) == 4
    assert rows[2] == [(0, x, 2, 0, core) for x in range(4) for core in range(2)]


def test_a_column_steps_from_neighbour_to_neighbour_in_three_dimensions() -> None:
    rows = placed(torus(2, 3, 4))[0]
    ends = [row[0] for row in rows]
    assert len(ends) == 12
    for (_, _, y, z, _), (_, _, other_y, other_z, _) in pairwise(ends):
        assert abs(y - other_y) + abs(z - other_z) == 1


def test_slices_are_an_axis_of_their_own() -> None:
    grid = placed(torus(2, 2, slices=3))
    assert [{position[0] for row in part for position in row} for part in grid] == [{0}, {1}, {2}]


def test_without_a_torus_rows_are_nodes() -> None:
    devices = [SimpleNamespace(process_index=process) for process in range(4)]
    assert [device_position(device, n // 2, n % 2) for n, device in enumerate(devices)] == [
        (0, 0, 0, 0, 0),
        (0, 1, 0, 0, 0),
        (0, 0, 1, 0, 0),
        (0, 1, 1, 0, 0),
    ]
    assert plan_grid([device_position(device, n // 2, n % 2) for n, device in enumerate(devices)]).tolist() == [
        [[0, 1], [2, 3]]
    ]
    tpu = SimpleNamespace(platform="tpu", process_index=7, coords=[1, 2, 0], core_on_chip=1, slice_index=3)
    assert device_position(tpu, 0, 0) == DevicePosition(3, 1, 2, 0, 1)
    # As PJRT describes GPUs: partition, host and index.
    gpu = SimpleNamespace(platform="gpu", process_index=1, coords=[1, 0, 5], core_on_chip=None, slice_index=1)
    assert device_position(gpu, 1, 5) == DevicePosition(0, 5, 1)


@pytest.mark.parametrize("processes_per_node", [1, 8])
@pytest.mark.parametrize("group", [1, 2, 8, 16])
def test_rows_are_nodes_for_any_number_of_processes_on_a_node(processes_per_node: int, group: int) -> None:
    """Two nodes of 8 GPUs, with one process a node or one a GPU. Batch-norm groups stay on a node if they fit."""
    devices = [Elsewhere(number, number * processes_per_node // 8) for number in range(16)]
    mesh = build_mesh(devices, group=group, processes_per_node=processes_per_node)  # type: ignore[arg-type]
    assert axis_size(mesh, ("slice", *COLUMN)) == 2
    assert axis_size(mesh, ROW) == 8
    ranks = [device.id for device in mesh.devices.reshape(-1)]
    assert ranks == list(range(16))  # the order of the samples


@pytest.mark.parametrize(
    ("columns", "row", "group", "tile"),
    [
        (32, 64, 1, (1, 1)),
        (32, 64, 2, (1, 2)),  # a chip of v3
        (32, 64, 4, (1, 4)),
        (32, 64, 8, (2, 4)),  # a tray of 2 x 2 chips with 2 cores each
        (32, 64, 16, (2, 8)),
        (32, 64, 128, (2, 64)),  # two whole rows
        (32, 64, 256, (16, 16)),
        (32, 64, 2048, (32, 64)),
        (1, 8, 8, (1, 8)),
        (4, 2, 4, (2, 2)),
        (8, 1, 4, (4, 1)),
    ],
)
def test_groups_are_tiles_of_neighbours(columns: int, row: int, group: int, tile: tuple[int, int]) -> None:
    assert plan_tile(columns, row, group) == tile


def test_the_members_of_a_group_are_consecutive_ranks() -> None:
    places = torus(2, 4, cores=2)
    mesh = arrange_devices(jax.devices()[:8] * 2, plan_grid(places), 8)
    assert shape(mesh) == {"column": 2, "group_column": 2, "group_row": 4}
    tiles = np.array(plan_grid(places)).reshape(1, 2, 2, 1, 4).transpose(0, 1, 3, 2, 4).reshape(2, 8)
    for members in tiles:
        assert {places[member].y // 2 for member in members} in ({0}, {1})
    assert axis_size(mesh, GROUP) == 8
    assert mesh.axis_names == DEVICES


@pytest.mark.parametrize(
    ("batches", "span", "devices", "group"),
    [((16, 32, 8), 8, 4, 4), ((16, 32), 8, 4, 2), ((24, 36), 12, 6, 6), ((16, 48), 8, 2, 1)],
)
def test_a_span_has_the_group_of_whole_groups_of_every_phase(
    batches: tuple[int, ...], span: int, devices: int, group: int
) -> None:
    first, *later = batches
    phases = [{"start": 1 + number, "global_batch": batch} for number, batch in enumerate(later)]
    train = {"epochs": 90, "global_batch": first, "phases": phases}
    config = RunConfig.model_validate({"model": {"batch_norm": {"span": span}}, "train": train})
    assert axis_size(mesh_for_config(config, jax.devices()[:devices]), GROUP) == group


def shape(mesh: Mesh) -> dict[str, int]:
    """Return the axes with more than one device, and their sizes."""
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def test_a_mesh_of_this_machine() -> None:
    assert shape(build_mesh(jax.devices())) == {"row": 8}
    mesh = build_mesh(jax.devices(), row=4, group=2)
    assert shape(mesh) == {"column": 2, "row": 2, "group_row": 2}
    assert [device.id for device in mesh.devices.reshape(-1)] == list(range(8))


@pytest.mark.parametrize(
    ("columns", "row", "parts", "tile"),
    [
        (32, 64, (1, 1), (1, 1)),
        (32, 64, (2, 1), (1, 2)),  # the two cores of a chip of v3
        (32, 64, (4, 1), (1, 4)),
        (32, 64, (2, 2), (2, 2)),
        (32, 64, (4, 2), (2, 4)),
        (1, 8, (2, 2), (1, 4)),  # one row: side by side
        (8, 1, (2, 1), (2, 1)),
    ],
)
def test_devices_that_share_images_are_neighbours(
    columns: int, row: int, parts: tuple[int, int], tile: tuple[int, int]
) -> None:
    assert plan_partition(columns, row, parts) == tile


def test_parts_of_an_image_lie_on_the_torus_as_in_the_image() -> None:
    places = torus(4, 4)
    mesh = arrange_devices(list(range(16)), plan_grid(places), 2, (4, 2))  # type: ignore[arg-type]
    assert shape(mesh) == {"group_column": 2, "height": 4, "width": 2}
    for sharers in mesh.devices.reshape(2, 4, 2):
        for down, across in ((1, 0), (0, 1)):
            ends = zip(sharers[: 4 - down, : 2 - across].flat, sharers[down:, across:].flat, strict=True)
            for one, other in ends:
                assert sum(abs(a - b) for a, b in zip(places[one], places[other], strict=True)) == 1
    group = build_mesh(jax.devices(), row=4, group=2, parts=(2, 1))
    assert shape(group) == {"column": 2, "group_row": 2, "height": 2}
    assert [device.id for device in group.devices.reshape(-1)] == list(range(8))


@dataclass(frozen=True)
class Elsewhere:
    """Device of another process."""

    id: int
    process_index: int


def test_devices_that_form_no_mesh_are_refused() -> None:
    eight = [DevicePosition(0, x, 0) for x in range(8)]
    with refused("8 devices", "divisor of 8", field="train.all_reduce.row", got=3):
        plan_grid(eight, 3)
    uneven = [DevicePosition(0, 0, 0), DevicePosition(0, 1, 0), DevicePosition(0, 0, 1)]
    with refused("(0: 2, 1: 1)", field="train.all_reduce.row", got=None):
        plan_grid(uneven)
    assert plan_grid(uneven, 3).shape == (1, 1, 3)
    with refused(field="launch.cluster.slices"):
        plan_grid([*eight, DevicePosition(1, 0, 0)])
    with refused("4 x 4 ranks", "such as 4", field="model.batch_norm", got=3):
        plan_tile(4, 4, 3)
    with refused("3 x 3 devices", field="train.spatial_partitions", got=2):
        plan_partition(3, 3, (2, 1))
    processes = [Elsewhere(number, number // 2) for number in range(4)]
    with refused("several processes", field="train.spatial_partitions", got=(4, 1)):
        build_mesh(processes, row=4, parts=(4, 1))  # type: ignore[arg-type]


def test_tpus_without_slice_variables_are_refused() -> None:
    """Without Google's own variables, each slice would train by itself."""
    tpus = tuple(SimpleNamespace(platform="tpu", slice_index=slice_) for slice_ in (0, 1, None))
    _check_slice(RankEnv(slice_id=1, slice_count=2), (tpus[1],))  # type: ignore[arg-type]
    _check_slice(RankEnv(), (tpus[2],))  # type: ignore[arg-type]
    for lost in (tpus[0], tpus[2]):
        with refused("slice 1 of 2", "MEGASCALE_NUM_SLICES", field="MEGASCALE_SLICE_ID", got=0):
            _check_slice(RankEnv(slice_id=1, slice_count=2), (lost,))
