"""From what the compiler says of a step to what a person wants to know of it."""

from typing import Any

from podscale.hardware import Topology
from podscale.jax.ahead.estimate import DeviceWork, StepBounds, compute_bounds, estimate_step_seconds, step_rates
from podscale.jax.ahead.program import NETWORK_AXIS, find_collectives, find_cycles, summarise_collectives
from podscale.jax.ahead.request import CompileRequest, CompileResult


def compile_findings(request: CompileRequest, compiled: CompileResult) -> dict[str, Any]:
    """All about a compiled step as JSON values: sizes in bytes of one device, times in seconds."""
    found, topology, train = compiled.findings, request.topology, request.config.train
    about: dict[str, Any] = {
        "run": request.config.run.id,
        "topology": {
            "name": str(topology),
            "chips": topology.chip_count,
            "devices": topology.device_count,
            "mesh": found["mesh"],
        },
        "model": request.config.model.name,
        "image_size": request.config.input.image_size,
        "classes": request.classes,
        "global_batch": train.global_batch,
        "batch": request.batch,
        "precision": train.precision,
        "optimizer": train.optimizer.name,
        "all_reduce": train.all_reduce.algorithm,
        "weight_update": train.weight_update,
        "fits": found["fits"],
        "memory": _memory_findings(found, topology),
    }
    if found["fits"]:
        about |= _speed_findings(request, compiled)
    times = {name: found[name] for name in ("trace_seconds", "compile_seconds", "cpu_seconds")}
    return {**about, **times, "from_cache": compiled.from_cache, "versions": compiled.versions}


def _memory_findings(found: dict[str, Any], topology: Topology) -> dict[str, int]:
    """available: of the device's memory (hbm), what a program may use; free: what is left of that; over: what lacks.

    The compiler names what is available to a program that does not fit; for one that fits it is known of the chip.
    """
    memory = {
        "hbm": round(topology.device_hbm_bytes),
        "available": round(topology.device_available_bytes),
        **found["memory"],
    }
    left = memory["available"] - memory["needed"]
    return {**memory, "free": left} if found["fits"] else {**memory, "over": -left}


def _speed_findings(request: CompileRequest, compiled: CompileResult) -> dict[str, Any]:
    found = compiled.findings
    collectives = find_collectives(compiled.text, found["mesh"])
    work = DeviceWork(
        found["flops"],
        found["bytes"],
        bytes_sent=sum(one.bytes_sent for one in collectives if one.axes != NETWORK_AXIS),
        bytes_between_slices=sum(one.bytes_sent for one in collectives if one.axes == NETWORK_AXIS),
    )
    bounds: StepBounds = compute_bounds(work, request.topology, request.config.train.precision)
    cycles, clock = find_cycles(compiled.text), request.topology.chip.clock_ghz
    seconds, source = estimate_step_seconds(found["optimal_seconds"], bounds)
    return {
        "collectives": summarise_collectives(collectives),
        "flops": work.flops,
        "bytes": work.bytes,
        "cost_model_seconds": found["optimal_seconds"],
        "cycles": cycles.total,
        "copy_cycles": cycles.copies,
        "cycle_seconds": cycles.total / clock / 1e9 if clock else None,
        "bound_seconds": vars(bounds),
        "binding": bounds.binding,
        "step_seconds": seconds,
        "step_source": source,
        **step_rates(seconds, request.config.train.global_batch, work, request.topology),
    }
