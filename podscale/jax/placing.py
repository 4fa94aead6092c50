"""Values of the host on the devices of a mesh, whichever process they belong to."""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax import Array
from jax.sharding import Mesh, NamedSharding

from podscale.jax.mesh import REPLICATED


def put_sharded(value: npt.NDArray[Any], sharding: NamedSharding) -> Array:
    """A value that every process has whole: each device takes its part."""
    places: dict[Any, Any] = dict(sharding.addressable_devices_indices_map(value.shape))
    pieces = jax.device_put([value[index] for index in places.values()], list(places))
    return jax.make_array_from_single_device_arrays(value.shape, sharding, pieces)


def put_replicated(values: Any, mesh: Mesh) -> Any:
    """Arrays in any nesting, which every process has: whole on every device."""
    sharding = NamedSharding(mesh, REPLICATED)
    return jax.tree.map(lambda value: put_sharded(np.asarray(value), sharding), values)


def assemble_array(part: npt.NDArray[Any], sharding: NamedSharding, *, dim: int, length: int) -> Array:
    """Parts of one array, of which each process has its own: `length` elements along `dim` in all.

    The devices of a process, in the order of the mesh, take equal consecutive pieces of its part. Returns at once; the
    part must not be written to any more.
    """
    shape = (*part.shape[:dim], length, *part.shape[dim + 1 :])
    places: dict[Any, Any] = dict(sharding.addressable_devices_indices_map(shape))
    starts = sorted({index[dim].start or 0 for index in places.values()})
    size, rest = divmod(part.shape[dim], len(starts))
    assert rest == 0, (part.shape, dim, len(starts))

    def piece(index: tuple[slice, ...]) -> npt.NDArray[Any]:
        number = starts.index(index[dim].start or 0)
        mine = (*index[:dim], slice(number * size, (number + 1) * size), *index[dim + 1 :])
        return part[mine]

    pieces = jax.device_put([piece(index) for index in places.values()], list(places))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)
