"""Mesh of a run's devices with named axes: slices, columns, rows, batch-norm groups, and devices that share images.

A row lies along one dimension of the physical torus (on machines without one: inside a node), a column across the rows.
Slices are connected by the data-centre network only. A batch-norm group is a tile of rows and columns, whose devices
are neighbours; a smaller group, of a phase with another batch, is a part of it. The two dimensions of a tile are axes
of their own, after the others, so that the devices of a group hold consecutive parts of a batch that is sharded over
`RANKS`: results depend on the size of the groups and not on their placement. The devices that share images
(`podscale.jax.spatial`) are a smaller tile of neighbours, which counts as one rank; with one device to an image their
axes have size 1.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import lcm, prod
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax import Array, Device
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podscale.config import RunConfig
from podscale.config.batch_phases import batch_phases
from podscale.config.ranks import batch_norm_group, check_ranks
from podscale.errors import InputError

SLICES = ("slice",)
COLUMN = ("column", "group_column")
"""Axes across the rows."""
SPATIAL = ("height", "width")
"""Axes of the devices that share images, each with a tile of them."""
ROW = ("row", "group_row", *SPATIAL)
"""Axes along the fast links."""
GROUP = ("group_column", "group_row")
"""Axes of the ranks that share batch statistics."""
RANKS = ("slice", "column", "row", "group_column", "group_row")
"""Axes of the ranks of the sample order: a rank is one device, or several that share images."""
DEVICES = (*RANKS, *SPATIAL)
REPLICATED = PartitionSpec()

AxisNames = tuple[str, ...]
"""Names of axes of the mesh that are used as one; the last varies fastest."""

Grid = npt.NDArray[np.int64]
"""Indices of devices [slice, column, row]: the last dimension runs along a row."""


class DevicePosition(NamedTuple):
    """Position of a device: its slice, its chip in the torus (x, y, z), and its core in the chip.

    Devices without a torus: y is the node, x the index in the node.
    """

    slice: int
    x: int
    y: int
    z: int = 0
    core: int = 0


def is_on_torus(device: Any) -> bool:
    """Return True for a TPU. A GPU has coordinates and a slice too, those of its host, without links along them."""
    return getattr(device, "platform", None) == "tpu"


def device_position(device: Any, node: int, index: int) -> DevicePosition:
    """Return the position of a jax device, which has this index on its node."""
    if not is_on_torus(device):
        return DevicePosition(0, index, node)
    slice_number = getattr(device, "slice_index", None) or 0
    x, y, z = device.coords
    return DevicePosition(slice_number, x, y, z, getattr(device, "core_on_chip", None) or 0)


def plan_grid(positions: Sequence[DevicePosition], row: int | None = None) -> Grid:
    """Arrange devices by slice, column and row: rows along x and the cores of a chip, columns along y and z.

    The order along z reverses at every other y, so that neighbours in a column are neighbours on the torus too. `row`
    is the number of devices in a row (default: all along x). Raises InputError if rows cannot have one length.
    """

    def torus_order(number: int) -> tuple[int, ...]:
        at = positions[number]
        return at.slice, at.y, at.z if at.y % 2 == 0 else -at.z, at.x, at.core

    ordered = sorted(range(len(positions)), key=torus_order)
    slices = _key_counts(at.slice for at in positions)
    lines = _key_counts((at.slice, at.y, at.z) for at in positions)
    if len(set(slices)) > 1:
        raise InputError(
            f"the slices of this job have unequal numbers of devices ({_format_sizes(slices)}), so they make no mesh",
            field="launch.cluster.slices",
        )
    if row is None and len(set(lines)) > 1:
        raise InputError(
            f"the nodes of this job have unequal numbers of devices ({_format_sizes(lines)}), so they make no grid",
            field="train.all_reduce.row",
            got=None,
            hint=f"Start the same number on each, or set this to a divisor of {slices[0]}.",
        )
    length = row or lines[0]
    if slices[0] % length:
        raise InputError(
            f"rows do not divide the {slices[0]} devices of a slice",
            field="train.all_reduce.row",
            got=length,
            hint=f"Choose a divisor of {slices[0]}.",
        )
    return np.array(ordered).reshape(len(slices), -1, length)


def plan_tile(columns: int, row: int, group: int, *, on_torus: bool = True) -> tuple[int, int]:
    """Return the shape (rows, ranks in each) of a batch-norm group of neighbours.

    Up to 4 ranks lie side by side in a row, more in two rows: 8 cores are then one tray of 2 x 2 chips (Google's JAX
    submission to MLPerf v0.7). If that does not fit, the most square tile is taken. Without a torus a row is a node,
    and a group takes as few rows as it can. Raises InputError if no tile fits.
    """
    fitting = [(a, group // a) for a in range(1, group + 1) if group % a == columns % a == row % (group // a) == 0]
    if not fitting:
        raise InputError(
            f"groups of this size (`group`, or `span` / images of a rank) do not tile the {columns} x {row} "
            "ranks of a slice",
            field="model.batch_norm",
            got=group,
            hint=f"Choose another size, such as {_nearest_tile(columns, row, group)}, or another train.all_reduce.row.",
        )
    if not on_torus:
        return fitting[0]  # the fewest rows
    preferred = (1, group) if group <= 4 else (2, group // 2)
    return preferred if preferred in fitting else min(fitting, key=lambda tile: (abs(tile[0] - tile[1]), tile))


def plan_partition(columns: int, row: int, parts: tuple[int, int]) -> tuple[int, int]:
    """Return the shape (rows, devices in each) of the devices that share images cut into parts by height and width.

    The first that fits is taken: the shape of the parts and its transpose, the longer side along the row first, so that
    neighbours in the image are neighbours on the torus; then devices of one row; then of one column. Raises InputError
    if none fits.
    """
    sharers = prod(parts)
    for a, b in (*sorted({parts, parts[::-1]}), (1, sharers), (sharers, 1)):
        if columns % a == row % b == 0:
            return a, b
    raise InputError(
        f"devices that share an image do not tile the {columns} x {row} devices of a slice",
        field="train.spatial_partitions",
        got=sharers,
        hint="Choose fewer, or another train.all_reduce.row.",
    )


def build_mesh(
    devices: Sequence[Device],
    *,
    row: int | None = None,
    group: int = 1,
    parts: tuple[int, int] = (1, 1),
    processes_per_node: int = 1,
) -> Mesh:
    """Build the mesh of a run with axes `DEVICES`. Raises InputError, the same on every host, if none fits."""
    positions, seen = [], Counter[int]()
    for device in devices:
        node = device.process_index // processes_per_node
        positions.append(device_position(device, node, seen[node]))
        seen[node] += 1
    mesh = arrange_devices(devices, plan_grid(positions, row), group, parts, on_torus=is_on_torus(devices[0]))
    for sharers in mesh.devices.reshape(-1, prod(parts)):
        if len({device.process_index for device in sharers}) > 1:
            raise InputError(
                f"{prod(parts)} devices share an image, and some of them belong to several processes, each of which "
                "reads images of its own",
                field="train.spatial_partitions",
                got=parts,
                hint="Choose fewer, or more devices for a process.",
            )
    return mesh


def mesh_for_config(config: RunConfig, devices: Sequence[Device], processes_per_node: int = 1) -> Mesh:
    """Build the mesh of a document. Raises InputError if the run does not fit the number of devices.

    With `model.batch_norm.span` the batch-norm groups change with the batch. The group of the mesh is then the smallest
    that consists of whole groups of every phase.
    """
    check_ranks(config, len(devices))
    parts = config.train.spatial_partitions
    group = lcm(*(batch_norm_group(phase.apply(config), len(devices)).ranks for phase in batch_phases(config.train)))
    row = config.train.all_reduce.row
    return build_mesh(devices, row=row, group=group, parts=parts, processes_per_node=processes_per_node)


def arrange_devices(
    devices: Sequence[Device], grid: Grid, group: int = 1, parts: tuple[int, int] = (1, 1), *, on_torus: bool = True
) -> Mesh:
    """Build the mesh of a grid of devices, with batch-norm groups of `group` ranks and images in `parts`."""
    _, columns, row = grid.shape
    down, across = plan_partition(columns, row, parts)
    sharers = _split_into_tiles(grid, down, across)  # [slice, column, row, down, across] of ranks
    if (down, across) == parts[::-1]:
        sharers = sharers.swapaxes(3, 4)
    ranks = sharers.reshape(*sharers.shape[:3], *parts)
    tiles = _split_into_tiles(ranks, *plan_tile(columns // down, row // across, group, on_torus=on_torus))
    placed = np.empty(len(devices), dtype=object)
    placed[:] = devices
    return Mesh(placed[tiles], DEVICES)


def _split_into_tiles(grid: Grid, a: int, b: int) -> Grid:
    """Reshape [slice, column, row, ...] to tiles of a x b: [slice, column / a, row / b, a, b, ...]."""
    slices, columns, row, *rest = grid.shape
    return grid.reshape(slices, columns // a, a, row // b, b, *rest).swapaxes(2, 3)


def axis_size(mesh: Mesh, axes: AxisNames) -> int:
    return prod(mesh.shape[axis] for axis in axes)


def _key_counts(keys: Iterable[Any]) -> list[int]:
    """Return how often each key occurs, in the order of the keys."""
    return [times for _, times in sorted(Counter(keys).items())]


def _format_sizes(sizes: list[int]) -> str:
    return ", ".join(f"{number}: {size}" for number, size in enumerate(sizes))


def _nearest_tile(columns: int, row: int, group: int) -> int:
    divisors = [a * b for a in range(1, columns + 1) if columns % a == 0 for b in range(1, row + 1) if row % b == 0]
    return min(divisors, key=lambda size: (abs(size - group), -size))


def put_sharded(value: npt.NDArray[Any], sharding: NamedSharding) -> Array:
    """Put `value`, which every process has, on the mesh; each device gets its part."""
    indices: dict[Any, Any] = dict(sharding.addressable_devices_indices_map(value.shape))
    pieces = jax.device_put([value[index] for index in indices.values()], list(indices))
    return jax.make_array_from_single_device_arrays(value.shape, sharding, pieces)


def put_replicated(values: Any, mesh: Mesh) -> Any:
    """Put arrays in any nesting, which every process has, on every device."""
    sharding = NamedSharding(mesh, REPLICATED)
    return jax.tree.map(lambda value: put_sharded(np.asarray(value), sharding), values)


def assemble_array(part: npt.NDArray[Any], sharding: NamedSharding, *, dim: int, length: int) -> Array:
    """Assemble one array from the `part` of each process: `length` elements along `dim` in all.

    The devices of a process, in the order of the mesh, take equal consecutive pieces of its part. Returns at once; the
    part must not be written to afterwards.
    """
    shape = (*part.shape[:dim], length, *part.shape[dim + 1 :])
    indices: dict[Any, Any] = dict(sharding.addressable_devices_indices_map(shape))
    starts = sorted({index[dim].start or 0 for index in indices.values()})
    size, rest = divmod(part.shape[dim], len(starts))
    assert rest == 0, (part.shape, dim, len(starts))

    def piece(index: tuple[slice, ...]) -> npt.NDArray[Any]:
        number = starts.index(index[dim].start or 0)
        return part[(*index[:dim], slice(number * size, (number + 1) * size), *index[dim + 1 :])]

    pieces = jax.device_put([piece(index) for index in indices.values()], list(indices))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)
