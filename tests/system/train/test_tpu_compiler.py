"""`podscale tpu compile` with the real TPU compiler; it needs libtpu, as in requirements/tpu.txt, but no TPU.

libtpu is not among the development packages (hundreds of MB for these tests alone): `pip install --no-deps libtpu==...`
into the environment of the tests, then `pytest tests/system/train/test_tpu_compiler.py`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from podscale.hardware import TPU_CHIPS, find_topology
from podscale.jax.aot.request import COMPILER_ENVIRONMENT
from tests.support.commands import set_options

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu: pip install --no-deps libtpu, as in requirements/tpu.txt",
    ),
]
DOCUMENT = """
run: {id: tiny}
data: {source: digits}
input: {image_size: 32}
model: {name: resnet18, width: 8, stem: small, batch_norm: {span: 128}}
train:
  global_batch: 256
  precision: bf16
  optimizer: {name: lars}
  weight_update: sharded
  all_reduce: {algorithm: torus2d}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a document, and the results of all tests of this module."""
    directory = tmp_path_factory.mktemp("tpu")
    (directory / "tiny.yaml").write_text(DOCUMENT)
    return directory


def command(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    arguments_ = [sys.executable, "-m", "podscale", "tpu", "compile", "tiny.yaml", "--cache", "kept", *arguments]
    return subprocess.run(arguments_, cwd=folder, capture_output=True, text=True, timeout=1500, check=False)


def compiled(folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    ended = command(folder, "--json", *arguments)
    assert ended.returncode == code, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def test_a_torus_with_a_sharded_update_is_what_the_document_says(folder: Path) -> None:
    """v3:2x2: two rows of 4 cores along x, batch-norm groups of 4."""
    report = compiled(folder, "--topology", "v3:2x2")
    assert report["topology"]["devices"] == 8
    assert report["fits"]
    assert 0 < report["memory"]["temporaries"] < report["memory"]["hbm"] == 2**34
    assert report["memory"]["aliased"] > 0.9 * report["memory"]["outputs"], "the state is donated"
    sizes: dict[tuple[str, str], int] = {}
    for row in report["collectives"]:
        sizes[row["kind"], row["axes"]] = row["bytes"]
    weights = 4 * 180_000
    row = "group_row"  # one batch-norm group fills a row here
    assert sizes["all-gather", row] > weights
    assert sizes["reduce-scatter", row] >= sizes["all-gather", row], "not an all-reduce, of which parts are dropped"
    assert sizes["all-reduce", "column"] < 0.5 * sizes["all-gather", row], "columns carry a quarter"
    assert report["step_source"] == "cost model"
    assert 1e9 < report["flops"] < 1e11
    again = compiled(folder, "--topology", "v3:2x2")
    assert again == {**report, "from_cache": True}


def test_slices_meet_over_the_network(folder: Path) -> None:
    report = compiled(folder, "--topology", "v5e:2x2", "--slices", "2")
    assert report["topology"]["mesh"]["slice"] == 2
    crossing = [row for row in report["collectives"] if row["axes"] == "network"]
    assert {row["kind"] for row in crossing} == {"all-reduce"}
    assert report["bound_seconds"]["network"] > 0


def test_a_step_that_does_not_fit_and_the_largest_that_does(folder: Path) -> None:
    """The step that does not fit is refused within seconds; few of the eight allowed batches are compiled."""
    options = ("model.width=16", "model.batch_norm.span=512", "train.global_batch=4096", "input.image_size=256")
    changes = ["--topology", "v5e:1x1", *set_options(*options)]
    report = compiled(folder, *changes, code=2)
    assert not report["fits"]
    assert report["memory"]["over"] == report["memory"]["needed"] - report["memory"]["available"] > 0
    swept = compiled(folder, *changes, "--sweep", "batch")
    fitting = {row["batch"]: row["fits"] for row in swept["tried"]}
    largest = swept["largest"]["batch"]
    assert fitting[largest]
    assert not fitting[largest + 512]
    assert len(fitting) < 6
    assert swept["largest"]["basis"] == "compiled"
    assert report["largest"]["basis"] == "proportion"
    assert 0.5 < report["largest"]["images"] / largest < 2, "an estimate from the step that does not fit"


LARGER = """
import sys
import jax
from jax.sharding import PartitionSpec, NamedSharding, Mesh
from podscale.hardware import find_topology
from podscale.jax.aot.compiler import topology_devices
from podscale.jax.out_of_memory import parse_out_of_memory

for name in sys.argv[1:]:
    topology = find_topology(name)
    mesh = Mesh(topology_devices(topology)[:1], "x")
    elements = int(topology.device_hbm / 4 * 1.2)
    given = jax.ShapeDtypeStruct((elements,), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x + 1).lower(given).compile()
    except jax.errors.JaxRuntimeError as error:
        print(name, parse_out_of_memory(str(error)).available / 2**30)
"""


def test_each_generation_leaves_a_program_the_memory_that_the_table_says() -> None:
    """Reported by the compiler for a program that is too large for each generation."""
    names = [f"{chip.name}:{chip.topology_names.split(', ')[1]}" for chip in TPU_CHIPS]
    ended = subprocess.run(
        [sys.executable, "-c", LARGER, *names],
        env={**os.environ, **COMPILER_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    memory = dict(line.split() for line in ended.stdout.splitlines())
    assert memory.keys() == set(names)
    for name, gib in memory.items():
        assert float(gib) == pytest.approx(find_topology(name).chip.available_gib, abs=1e-6), name


def test_a_document_that_does_not_fit_the_topology(folder: Path) -> None:
    ended = command(
        folder, "--topology", "v3:2x2", "--set", "train.global_batch=260", "--set", "model.batch_norm.span=26"
    )
    assert ended.returncode == 2
    assert re.search(r"train\.global_batch.* 8 x 1\b", ended.stderr)
