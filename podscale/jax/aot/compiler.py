"""Child process of `podscale tpu compile`: compile one step for described devices and write the compiler's report.

    python -m podscale.jax.aot.compiler FOLDER

FOLDER holds job.json (document, topology, slices, classes, steps); result.json and program.hlo.gz are written there.
The environment must keep jax off accelerators and libtpu off Google's metadata server (see `request`).
"""

import gzip
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Device, ShapeDtypeStruct
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from podscale import models
from podscale.config import RunConfig
from podscale.data.step_positions import step_positions
from podscale.errors import InputError, fields_of
from podscale.hardware import Topology, find_topology
from podscale.jax.device_prefetcher import BATCH_SPECS, GlobalBatches
from podscale.jax.mesh import RANKS, REPLICATED, axis_size, mesh_for_config
from podscale.jax.optim import OptState
from podscale.jax.out_of_memory import parse_out_of_memory
from podscale.jax.train_step import STATUS_LENGTH, STATUS_SPEC, DeviceState, StepInputs, TrainStep, build_train_step
from podscale.training.schedules import COLUMNS
from podscale.util.files import write_json


def main(folder: Path) -> None:
    """Run the job of a folder. The InputError of a document that the engine or topology rejects is a result, too."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    config = RunConfig.model_validate(job["document"])
    try:
        topology = find_topology(job["topology"], job["slices"])
        analysis, text = compile_step(config, topology_devices(topology), job["classes"], job["steps"])
    except InputError as error:
        analysis, text = {"refused": fields_of(error)}, ""
    (folder / "program.hlo.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    write_json(folder / "result.json", analysis)


def compile_step(config: RunConfig, devices: Sequence[Device], classes: int, steps: int) -> tuple[dict[str, Any], str]:
    """Return the compiler's report of one step of a document, and the program's text; "" if memory is too small.

    `devices` may be described ones. `steps` is the length of the schedule. Raises InputError if the document does not
    fit the devices.
    """
    mesh = mesh_for_config(config, devices)
    # Approximate if batches change by phase; positions are only constants of the program.
    samples = round(steps * config.train.global_batch / config.train.epochs)
    step = build_train_step(config, mesh, classes, step_positions(config.train, samples))
    started = time.monotonic()
    lowered = step.run_steps.lower(*step_arguments(step, config, classes, steps))  # type: ignore[attr-defined]
    traced, cpu_before = time.monotonic(), time.process_time()
    analysis: dict[str, Any] = {"mesh": dict(mesh.shape), "trace_seconds": round(traced - started, 1)}
    text = ""
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        memory = parse_out_of_memory(str(error))
        if memory is None:
            raise
        analysis |= {"fits": False, "memory": memory._asdict()}
    else:
        analysis |= {"fits": True, "memory": device_memory_bytes(compiled), **cost_analysis(compiled)}
        text = compiled.as_text()
    analysis["compile_seconds"] = round(time.monotonic() - traced, 1)
    analysis["cpu_seconds"] = round(time.process_time() - cpu_before, 1)
    return analysis, text


def topology_devices(topology: Topology) -> list[Device]:
    """Return the devices of a topology as the TPU compiler describes them; they can only be compiled for.

    Raises InputError if libtpu does not know the topology.
    """
    options: dict[str, Any] = {"chip_config_name": topology.chip.config} if topology.chip.config else {}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.chip_count == topology.slices:
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        described = topologies.get_topology_desc(topology.compiler_name, platform="tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith(("INVALID_ARGUMENT", "NOT_FOUND")):
            raise
        raise InputError(
            f"the installed libtpu cannot describe it: {error}", field="--topology", got=str(topology)
        ) from error
    return list(described.devices)


def step_arguments(step: TrainStep, config: RunConfig, classes: int, steps: int) -> tuple[Any, ...]:
    """Return the shapes of a step's arguments with their sharding."""
    buffers = models.model_spec(config.model, classes).buffers
    buckets = tuple(_shape((length,)) for length in step.layout.lengths)
    moments: dict[str, Any] = dict.fromkeys(step.optimizer.initial_moments, buckets)
    scalars: dict[str, Any] = dict.fromkeys(step.optimizer.initial_scalars, _shape(()))
    layout = step.optimizer.extra_layout
    extra: dict[str, Any] = (
        {name: _shape(a.shape) for name, a in layout.pack(layout.initial()).items()} if layout else {}
    )
    state_of_shapes: Any = DeviceState
    state = state_of_shapes(
        weights=buckets,
        opt_state=OptState(moments, scalars, extra),
        statistics={buffer.name: _shape(buffer.shape) for buffer in buffers},
        number=_shape((), np.int32),
    )
    images, side = config.train.global_batch, config.input.image_size
    batches: Any = GlobalBatches(_shape((1, images, side, side, 3), np.uint8), _shape((1, images), np.int32))  # type: ignore[arg-type]
    inputs = StepInputs(_shape((), np.int32), _shape((axis_size(step.mesh, RANKS), STATUS_LENGTH), np.int32))
    shapes = state, batches, _shape((steps, len(COLUMNS))), inputs
    specs = step.specs, BATCH_SPECS, REPLICATED, StepInputs(REPLICATED, STATUS_SPEC)

    def with_sharding(shape: ShapeDtypeStruct, spec: PartitionSpec) -> ShapeDtypeStruct:
        return ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(step.mesh, spec))

    return jax.tree.map(with_sharding, shapes, specs)  # type: ignore[no-any-return]


def _shape(shape: tuple[int, ...], dtype: Any = np.float32) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, dtype)


def device_memory_bytes(compiled: Any) -> dict[str, int]:
    """Return bytes on each device. Aliased outputs take the memory of donated arguments."""
    stats = compiled.memory_analysis()
    parts = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    needed = parts["arguments"] + parts["outputs"] - parts["aliased"] + parts["temporaries"] + parts["code"]
    return {"needed": needed, **parts}


def cost_analysis(compiled: Any) -> dict[str, float]:
    """Return the compiler's cost analysis of one device: operations, bytes read and written, and estimated seconds."""
    costs = compiled.cost_analysis() or {}  # a compiler for GPUs has none
    return {
        "flops": float(costs.get("flops", 0.0)),
        "bytes": float(costs.get("bytes accessed", 0.0)),
        "optimal_seconds": float(costs.get("optimal_seconds", 0.0)),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
