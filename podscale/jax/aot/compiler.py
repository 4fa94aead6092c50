"""Child process of `podscale tpu compile`: compile one step for described devices and write the compiler's report.

    python -m podscale.jax.aot.compiler FOLDER

FOLDER holds job.json (document, topology, slices, classes, steps); result.json and program.hlo.gz are written there.
The environment must keep jax off accelerators and libtpu off Google's metadata server (see `request`).
"""

import gzip
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Device, ShapeDtypeStruct
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podscale import models
from podscale.config import RunConfig
from podscale.errors import InputError, fields_of
from podscale.hardware import Topology, find_topology
from podscale.jax.device_prefetcher import BATCH_SPECS, GlobalBatches
from podscale.jax.mesh import RANKS, REPLICATED, axis_size, mesh_for_config
from podscale.jax.optim import HyperParams, OptState
from podscale.jax.out_of_memory import parse_out_of_memory
from podscale.jax.train_step import STATUS_LENGTH, STATUS_SPEC, DeviceState, StepInputs, TrainStep, build_train_step
from podscale.util.files import write_json


def main(folder: Path) -> None:
    """Carries out the job of a folder. A document that this engine or the topology refuses is a result, too."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    config = RunConfig.model_validate(job["document"])
    try:
        found, text = compile_step(
            config, find_topology(job["topology"], job["slices"]), job["classes"], job["updates"]
        )
    except InputError as error:
        found, text = {"refused": fields_of(error)}, ""
    (folder / "program.hlo.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    write_json(folder / "result.json", found)


def compile_step(config: RunConfig, topology: Topology, classes: int, updates: int) -> tuple[dict[str, Any], str]:
    """What the compiler says of one update of a document, and the program's text; empty where memory is too small.

    updates: of the whole run, the length of the schedule. Raises InputError for what does not fit the topology.
    """
    mesh = mesh_for_config(config, topology_devices(topology))
    step = build_train_step(config, mesh, classes)
    started = time.monotonic()
    lowered = step.run_steps.lower(*step_arguments(step, config, classes, updates))  # type: ignore[attr-defined]
    traced, worked = time.monotonic(), _cpu_seconds()
    found: dict[str, Any] = {"mesh": dict(mesh.shape), "trace_seconds": round(traced - started, 1)}
    text = ""
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        shortage = parse_out_of_memory(str(error))
        if shortage is None:
            raise
        found |= {"fits": False, "memory": shortage._asdict()}
    else:
        found |= {"fits": True, "memory": device_memory_bytes(compiled), **cost_analysis(compiled)}
        text = compiled.as_text()
    found |= {"compile_seconds": round(time.monotonic() - traced, 1), "cpu_seconds": round(_cpu_seconds() - worked, 1)}
    return found, text


def _cpu_seconds() -> float:
    """Seconds of all cores that this process has had."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def topology_devices(topology: Topology) -> list[Device]:
    """The devices of a topology as the TPU compiler describes them; they can be compiled for, and nothing else.

    Raises InputError where libtpu does not know the topology.
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


def step_arguments(step: TrainStep, config: RunConfig, classes: int, updates: int) -> tuple[Any, ...]:
    """Shapes of what one update is given, each with its place on the mesh."""
    buffers = models.model_spec(config.model, classes).buffers
    buckets = tuple(_shape((length,)) for length in step.layout.lengths)
    moments: dict[str, Any] = dict.fromkeys(step.initial_moments, buckets)
    others: dict[str, Any] = dict.fromkeys(step.specs.opt_state.scalars, _shape(()))
    of_shapes: Any = DeviceState
    state = of_shapes(
        weights=buckets,
        opt_state=OptState(moments, others),
        statistics={buffer.name: _shape(buffer.shape) for buffer in buffers},
        number=_shape((), np.int32),
    )
    images, side = config.train.global_batch, config.input.image_size
    batches: Any = GlobalBatches(_shape((1, images, side, side, 3), np.uint8), _shape((1, images), np.int32))  # type: ignore[arg-type]
    call = StepInputs(_shape((), np.int32), _shape((axis_size(step.mesh, RANKS), STATUS_LENGTH), np.int32))
    given = state, batches, _shape((updates, len(HyperParams._fields))), call
    specs = step.specs, BATCH_SPECS, REPLICATED, StepInputs(REPLICATED, STATUS_SPEC)
    placed: tuple[Any, ...] = jax.tree.map(lambda shape, spec: _shape_on_mesh(shape, step.mesh, spec), given, specs)
    return placed


def _shape(shape: tuple[int, ...], dtype: Any = np.float32) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, dtype)


def _shape_on_mesh(shape: Any, mesh: Mesh, spec: PartitionSpec) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))


def device_memory_bytes(compiled: Any) -> dict[str, int]:
    """Bytes on each device; what is aliased is an output that takes the place of a donated argument."""
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
    """The compiler's cost analysis of one device: operations, bytes they read and write, its own estimate in s."""
    costs = compiled.cost_analysis()
    return {
        "flops": float(costs.get("flops", 0.0)),
        "bytes": float(costs.get("bytes accessed", 0.0)),
        "optimal_seconds": float(costs.get("optimal_seconds", 0.0)),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
