"""All-reduce algorithms: results equal the float64 mean, and the compiled program has the intended collectives."""

import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from podscale.config.train import AllReduceSection
from podscale.jax.all_reduce import build_all_reduce
from podscale.jax.mesh import RANKS, arrange_devices
from tests.support.refusals import refused
from tests.support.xla import list_groups

DEVICES = 8
GRIDS = {"one row": (1, 1, 8), "two rows": (1, 2, 4), "two slices": (2, 2, 2), "one column": (1, 8, 1)}
COLLECTIVE = re.compile(
    r" = (?:f32|bf16)\[(\d*)\]\S* (reduce-scatter|all-reduce|all-gather)\(.*?replica_groups=(\{\{.*?\}\}|\S+?),"
)


def mesh_of(shape: tuple[int, int, int]) -> Mesh:
    return arrange_devices(jax.devices(), np.arange(DEVICES).reshape(shape))


def mapped(body: Any, mesh: Mesh, outputs: Any) -> Any:
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(RANKS), out_specs=outputs, check_vma=False))


def collectives(text: str) -> list[tuple[str, int, str]]:
    """Return kind, elements of the result, and groups of each collective in a compiled program."""
    return [(kind, int(size or 1), groups) for size, kind, groups in COLLECTIVE.findall(list_groups(text))]


def rows_of(shape: tuple[int, int, int]) -> str:
    rows = np.arange(DEVICES).reshape(-1, shape[2])
    return "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows.tolist()) + "}"


def columns_of(shape: tuple[int, int, int]) -> str:
    columns = np.arange(DEVICES).reshape(shape).transpose(0, 2, 1).reshape(-1, shape[1])
    return "{" + ",".join("{" + ",".join(map(str, column)) + "}" for column in columns.tolist()) + "}"


SECTIONS = {
    "flat": AllReduceSection(),
    "torus2d": AllReduceSection(algorithm="torus2d"),
    "torus2d over all devices": AllReduceSection(algorithm="torus2d", shard_over="world"),
}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS.keys())
@pytest.mark.parametrize("shape", GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize("length", [1, 37, 4096])
def test_every_device_gets_the_mean(section: AllReduceSection, shape: tuple[int, int, int], length: int) -> None:
    mesh = mesh_of(shape)
    reduce = build_all_reduce(section, mesh)
    values = np.random.default_rng(0).normal(size=(DEVICES, length)).astype(np.float32)
    reduced = np.asarray(mapped(lambda mine: reduce(mine[0])[None], mesh, PartitionSpec(RANKS))(values))
    assert reduced.shape == values.shape
    np.testing.assert_allclose(reduced[0], values.astype(np.float64).mean(0), rtol=1e-6, atol=3e-7)
    for other in reduced[1:]:
        np.testing.assert_array_equal(other, reduced[0])


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS.keys())
@pytest.mark.parametrize("shape", GRIDS.values(), ids=GRIDS.keys())
def test_reduce_scatter_and_all_gather_make_up_the_all_reduce(
    section: AllReduceSection, shape: tuple[int, int, int]
) -> None:
    mesh = mesh_of(shape)
    reduce = build_all_reduce(section, mesh)
    assert reduce.shards == (shape[2] if section == SECTIONS["torus2d"] else DEVICES)
    values = np.random.default_rng(0).normal(size=(DEVICES, 40)).astype(np.float32)

    def halves(mine: Any) -> Any:
        shard = reduce.reduce_scatter(mine[0])
        return shard[None], reduce.all_gather(shard)[None], jax.lax.axis_index(reduce.axes)[None]

    shards, whole, places = map(np.asarray, mapped(halves, mesh, PartitionSpec(RANKS))(values))
    mean = values.astype(np.float64).mean(0)
    assert shards.shape == (DEVICES, 40 // reduce.shards)
    for shard, position in zip(shards, places, strict=True):
        np.testing.assert_allclose(shard, np.split(mean, reduce.shards)[position], rtol=1e-6, atol=3e-7)
    np.testing.assert_allclose(whole, np.tile(mean, (DEVICES, 1)), rtol=1e-6, atol=3e-7)


def test_the_compiled_collectives_have_the_planned_sizes_and_groups() -> None:
    """Kinds, sizes and groups as compiled: rows carry the bucket, columns 1/row, slices 1/(row x column)."""

    def emitted(algorithm: Any, shape: tuple[int, int, int]) -> list[tuple[str, int, str]]:
        mesh = mesh_of(shape)
        reduce = build_all_reduce(AllReduceSection(algorithm=algorithm), mesh)
        body = mapped(lambda mine: reduce(mine[0]), mesh, PartitionSpec())
        return collectives(body.lower(jax.ShapeDtypeStruct((DEVICES, 64), "float32")).compile().as_text())

    two_rows, two_slices = GRIDS["two rows"], GRIDS["two slices"]
    assert emitted("flat", two_rows) == [("all-reduce", 64, "{{0,1,2,3,4,5,6,7}}")]
    assert emitted("torus2d", two_rows) == [
        ("reduce-scatter", 16, rows_of(two_rows)),
        ("all-reduce", 16, columns_of(two_rows)),
        ("all-gather", 64, rows_of(two_rows)),
    ]
    across = emitted("torus2d", two_slices)
    assert across == [
        ("reduce-scatter", 32, rows_of(two_slices)),
        ("reduce-scatter", 16, columns_of(two_slices)),
        ("all-reduce", 16, "{{0,4},{1,5},{2,6},{3,7}}"),
        ("all-gather", 32, columns_of(two_slices)),
        ("all-gather", 64, rows_of(two_slices)),
    ]
    assert Counter(kind for kind, _, _ in across)["all-reduce"] == 1


def test_options_that_this_engine_lacks_are_refused() -> None:
    mesh = mesh_of((1, 1, 8))
    with refused("torus2d", field="train.all_reduce.algorithm", got="tree"):
        build_all_reduce(AllReduceSection(algorithm="tree"), mesh)
    with refused("fp32", field="train.all_reduce.wire_row"):
        build_all_reduce(AllReduceSection(algorithm="torus2d", wire_row="bf16"), mesh)
    with refused("fp32", field="train.all_reduce.wire_column"):
        build_all_reduce(AllReduceSection(algorithm="torus2d", wire_column="int8"), mesh)
