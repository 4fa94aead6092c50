"""`podscale tpu compile` compiles the step as it is run, and reads its collectives from the program's text."""

from collections import Counter

import jax
import numpy as np

from podscale.data.step_positions import step_positions
from podscale.jax.aot.compiler import cost_analysis, device_memory_bytes, step_arguments
from podscale.jax.aot.hlo import find_collectives
from podscale.jax.mesh import mesh_for_config
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
