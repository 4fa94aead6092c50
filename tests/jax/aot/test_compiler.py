"""`podscale tpu compile` compiles the step as it is run, and reads its collectives from the program's text.

For GPUs a step is lowered without a GPU and without JAX's plugin for CUDA; `test_cuda.py` compiles it with that plugin.
"""

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from podscale.data.step_positions import step_positions
from podscale.jax import train_step
from podscale.jax.aot.compiler import cost_analysis, device_memory_bytes, step_arguments
from podscale.jax.aot.hlo import find_collectives
from podscale.jax.mesh import mesh_for_config
from podscale.jax.models import choose_convolution
from podscale.jax.train_step import STATUS_LENGTH, StepInputs, build_train_step
from tests.jax.test_train_step import (
    CLASSES,
    LARS,
    RESNET,
    SAMPLES,
    SCHEDULE,
    SHARDED,
    STEPS,
    batches,
    begin,
    document,
)


def test_the_compiled_step_takes_real_arguments_and_its_collectives_are_found() -> None:
    """Eight simulated devices, a sharded step in rows of four, batch norm over pairs."""
    config = document(RESNET, span=8, optimizer=LARS, **SHARDED)
    step = build_train_step(
        config, mesh_for_config(config, jax.devices()), CLASSES, step_positions(config.train, SAMPLES)
    )
    compiled = step.run_steps.lower(*step_arguments(step, config, CLASSES, STEPS)).compile()

    images, labels = batches(config.input.image_size)
    call = StepInputs(np.int32(1), np.zeros((8, STATUS_LENGTH), np.int32))
    state, results = compiled(begin(step, config), step.put_batches(images[:1], labels[:1]), SCHEDULE, call)
    assert results.finite.tolist() == [True]
    assert int(state.number) == 1

    memory, costs = device_memory_bytes(compiled), cost_analysis(compiled)
    assert memory["aliased"] == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)), "donated"
    assert costs["flops"] > 1e6
    assert costs["bytes"] > memory["arguments"]

    buckets, layers = len(step.layout.lengths), len(state.statistics) // 2
    collectives = find_collectives(compiled.as_text(), dict(step.mesh.shape))
    sizes = Counter()
    for one in collectives:
        sizes[one.kind, one.axes] += one.bytes
    # The mesh is 1 slice, 2 rows of 4 devices, and groups of 2 side by side in a row.
    weights = 4 * sum(step.layout.lengths)
    extra = sizes["all-gather", "row+group_row"] - weights
    assert 0 < extra == sizes["reduce-scatter", "row+group_row"] - weights, "the bucket of loss and statistics"
    assert sizes["all-reduce", "column"] == (weights + extra) // 4
    channels = sum(array.size for array in state.statistics.values()) // 2
    assert sizes["all-reduce", "group_row"] == 2 * 2 * 4 * channels, "two sums a channel, forward and backward"
    assert {one.members for one in collectives if one.axes == "row+group_row"} == {4}
    assert buckets > 2
    assert layers > 10


def lowered_for_cuda(config: Any, monkeypatch: pytest.MonkeyPatch, *, devices: str = "cuda") -> str:
    """Return the whole step of eight simulated devices as it is given to XLA for GPUs.

    Args:
        devices: platform by which the convolutions are chosen.
    """
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=devices)]))
    monkeypatch.setattr(train_step, "choose_convolution", lambda of_cpus: choose_convolution(mesh))
    positions = step_positions(config.train, SAMPLES)
    step = build_train_step(config, mesh_for_config(config, jax.devices()), CLASSES, positions)
    traced: Any = step.run_steps.trace(*step_arguments(step, config, CLASSES, STEPS))  # type: ignore[attr-defined]
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize(
    ("changes", "collectives", "libraries"),
    [
        ({"optimizer": LARS}, {"all_reduce"}, set()),
        ({"optimizer": LARS, **SHARDED}, {"all_reduce", "all_gather", "reduce_scatter"}, set()),
        ({"optimizer": {"name": "muon"}}, {"all_reduce", "all_gather"}, set()),
        ({"optimizer": {"name": "shampoo"}}, {"all_reduce", "all_gather"}, {"cusolver_syevd_ffi"}),
    ],
    ids=["replicated", "sharded", "muon", "shampoo"],
)
def test_a_whole_step_is_lowered_for_gpus(
    changes: dict[str, Any], collectives: set[str], libraries: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = document(RESNET, span=8, precision="bf16", **changes)
    text = lowered_for_cuda(config, monkeypatch)
    convolutions = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    assert len(convolutions) == 3 * 20 - 1, "each layer with its gradients, and no products in their place"
    operands = [re.findall(r"tensor<[\dx]*x(\w+)>", line.rpartition(" : ")[2])[:2] for line in convolutions]
    assert all(found == ["bf16", "bf16"] for found in operands)
    assert set(re.findall(r"stablehlo\.(all_\w+|reduce_scatter|collective_\w+)", text)) == collectives
    assert set(re.findall(r"custom_call @(\w+)", text)) == libraries, "only calls that CUDA's libraries answer"


def test_products_in_place_of_convolutions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: the same count in a step that was built for CPUs."""
    text = lowered_for_cuda(document(RESNET, precision="bf16", optimizer=LARS), monkeypatch, devices="cpu")
    assert text.count("stablehlo.convolution") == 3 * 13 - 1
