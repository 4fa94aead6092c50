"""Report of `podscale tpu compile`: step time by the compiler's cost model, bounds by the peaks of the chip, memory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from podscale.hardware import Topology
from podscale.jax.aot.hlo import NETWORK_AXIS, find_collectives, find_cycles, summarise_collectives
from podscale.jax.aot.request import CompileRequest, CompileResult
from podscale.util.formatting import format_bytes, format_count

MATMUL_PASSES = {"fp32": 6}
"""Products of bf16 that one of a TPU's exact fp32 products takes (XLA's precision HIGHEST; a 3 x 3 convolution compiled
so by libtpu 0.0.42.1 has 5.2 times the cycles on v5e and 5.6 on v3); 1 for other precisions. XLA's count of operations
knows nothing of it."""


@dataclass(frozen=True)
class StepBounds:
    """Seconds that a step takes at least, one reason at a time.

    compute: floating-point operations at the peak rate. memory: bytes that operations read and write, as if nothing
    stayed on the chip between them. links: what a chip sends to its neighbours, over all its links at once; where it
    has two devices, what these send each other counts as well, so that this is up to twice too much. network: what it
    sends between slices; 0 where its rate is not known.
    """

    compute: float
    memory: float
    links: float
    network: float

    @property
    def binding(self) -> str:
        """The largest."""
        values = asdict(self)
        return max(values, key=lambda name: values[name])

    @property
    def seconds(self) -> float:
        """Of a step that does everything at once."""
        return float(max(asdict(self).values()))


@dataclass(frozen=True)
class DeviceWork:
    """Of one device and step. sent, bytes_between_slices: bytes to other devices of the slice, and to other slices."""

    flops: float
    bytes: float
    bytes_sent: float
    bytes_between_slices: float


def compute_bounds(work: DeviceWork, topology: Topology, precision: str) -> StepBounds:
    """The bounds of a device's work; devices of a chip share what it has."""
    chip = topology.chip

    def share(rate: float) -> float:
        return rate / chip.devices

    return StepBounds(
        compute=work.flops * MATMUL_PASSES.get(precision, 1) / share(chip.bf16_tflops * 1e12),
        memory=work.bytes / share(chip.memory_bandwidth * 1e9),
        links=work.bytes_sent / share(chip.link_bandwidth * 1e9),
        network=work.bytes_between_slices / share(chip.network_bandwidth * 1e9) if chip.network_bandwidth else 0.0,
    )


def estimate_step_seconds(cost_model: float | None, bounds: StepBounds) -> tuple[float, str]:
    """Seconds of a step, and where they are from: `cost model`, or `roofline` where the model's cannot be.

    It cannot be negative, and no step is faster than its arithmetic at the peak rate. (Its other bounds count as too
    high what stays on the chip, and what is overlapped: they do not tell a wrong estimate from a right one.)
    """
    if cost_model is not None and cost_model > bounds.compute > 0:
        return cost_model, "cost model"
    return bounds.seconds, "roofline"


def step_rates(seconds: float, global_batch: int, work: DeviceWork, topology: Topology) -> dict[str, Any]:
    """What a step of so many seconds means: images/s of all devices, and the share of the peak that it uses."""
    peak = topology.chip.bf16_tflops * 1e12 / topology.chip.devices
    return {"images_per_second": global_batch / seconds, "peak_share": work.flops / seconds / peak}


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


BOUND_NAMES = {
    "compute": "arithmetic",
    "memory": "memory",
    "links": "the links between chips",
    "network": "the network between slices",
}
CAVEAT = "Compiled by the real TPU compiler, not run: times are the compiler's or a bound, not measurements."


def format_compile_report(found: Mapping[str, Any]) -> list[str]:
    """Lines about one compiled step."""
    topology = found["topology"]
    rows = [
        (
            "topology",
            f"{topology['name']}: {format_count(topology['chips'], 'chip')}, "
            f"{format_count(topology['devices'], 'device')}",
        ),
        ("mesh", ", ".join(f"{name} {size}" for name, size in topology["mesh"].items())),
        ("step", _step(found)),
        ("memory", _memory_rows(found)),
    ]
    if "largest" in found:
        rows.append(("largest", _largest(found)))
    if found["fits"]:
        rows += [("work", _work(found)), ("at least", _bounds(found)), ("estimate", _estimate(found))]
        rows.append(("cycles", _cycles(found)))
    rows.append(("compiled", _compiled(found)))
    lines = [f"{name:<10} {value}" for name, value in rows]
    if found["fits"]:
        lines += ["", *_collectives(found["collectives"])]
    return [*lines, "", CAVEAT]


def format_sweep_report(rows: Sequence[Mapping[str, Any]], largest: int) -> list[str]:
    """The batches that were tried, in ascending order, and which are best."""
    holder = _rank_description(rows[0])
    lines = [f"{'batch':>8} {'global':>9} {'memory':>10} {'ms a step':>10} {'images/s':>12}  "]
    for row in sorted(rows, key=lambda row: int(row["batch"])):
        needed = format_bytes(row["memory"]["needed"])
        speed = f"{row['step_seconds'] * 1e3:>10.1f} {row['images_per_second']:>12,.0f}" if row["fits"] else ""
        note = f"  {row['step_source']}" if row["fits"] else f"  {format_bytes(row['memory']['over'])} too much"
        lines.append(f"{row['batch']:>8} {row['global_batch']:>9,} {needed:>10} {speed}{note}")
    fastest = max((row for row in rows if row["fits"]), key=lambda row: float(row["images_per_second"]))
    lines += [
        "",
        f"Largest that fits: {format_count(largest, 'image')} {holder}. Fastest of those tried: {fastest['batch']}, by "
        "estimate.",
    ]
    return lines


def _step(found: Mapping[str, Any]) -> str:
    return (
        f"{found['model']} at {found['image_size']} px in {found['precision']}, {found['optimizer']}, "
        f"{found['weight_update']} update, {found['all_reduce']}: {format_count(found['batch'], 'image')} "
        f"{_rank_description(found)}, {found['global_batch']:,} in all"
    )


def _memory_rows(found: Mapping[str, Any]) -> str:
    memory = found["memory"]
    needed = format_bytes(memory["needed"])
    usable = f"{format_bytes(memory['available'])} that a program may use of a device's {format_bytes(memory['hbm'])}"
    if not found["fits"]:
        return f"DOES NOT FIT: {needed} needed of {usable}: {format_bytes(memory['over'])} too much"
    return (
        f"fits: {needed} of {usable}; arguments {format_bytes(memory['arguments'])} (of which "
        f"{format_bytes(memory['aliased'])} become outputs), temporaries {format_bytes(memory['temporaries'])}"
    )


def _largest(found: Mapping[str, Any]) -> str:
    """The largest batch that fits, and how that is known."""
    largest, holder = found["largest"], _rank_description(found)
    batch, of = largest["batch"], largest["of"]
    said = f"{format_count(batch, 'image')} {holder}, {largest['global_batch']:,} in all"
    if largest["basis"] == "compiled":
        if not batch:
            return f"no batch fits: not {format_count(of[0], 'image')} {holder}, the smallest that the document allows"
        if len(of) == 1:
            return f"{said}: fits, and no larger one is allowed or tried (compiled)"
        return f"{said}: fits, and {of[1]} do not (both compiled)"
    if not batch:
        said = "no batch that the document allows"
    room = f"memory for about {format_count(largest['images'], 'image')}"
    how = (
        f"by a line through the memory of {of[0]} and {of[1]}"
        if largest["basis"] == "line"
        else f"by this step alone, whose {'temporaries are' if found['fits'] else 'memory is'} taken to grow evenly"
    )
    more = "; more may fit, because the compiler recomputes where it runs short" if found["fits"] else ""
    return f"{said}, an ESTIMATE (exactly: --sweep batch)\n{'':<10} {room}, {how}{more}"


def _rank_description(found: Mapping[str, Any]) -> str:
    """Who holds images of its own."""
    mesh = found["topology"]["mesh"]
    sharers = mesh["height"] * mesh["width"]
    return "a device" if sharers == 1 else f"for each {sharers} devices"


def _work(found: Mapping[str, Any]) -> str:
    return f"{found['flops'] / 1e12:.3g} TFLOP and {found['bytes'] / 1e9:.3g} GB read and written, a device"


def _bounds(found: Mapping[str, Any]) -> str:
    parts = [f"{_ms(value)} for {BOUND_NAMES[name]}" for name, value in found["bound_seconds"].items() if value]
    return f"{', '.join(parts)}; {BOUND_NAMES[found['binding']]} binds"


def _estimate(found: Mapping[str, Any]) -> str:
    told = found["cost_model_seconds"]
    source = "the compiler's cost model"
    if found["step_source"] == "roofline":
        source = f"the largest bound, because the cost model's {told * 1e3:,.1f} ms cannot be"
    return (
        f"{_ms(found['step_seconds'])} a step ({source}): {found['images_per_second']:,.0f} images/s, "
        f"{found['peak_share']:.0%} of the chips' peak"
    )


def _cycles(found: Mapping[str, Any]) -> str:
    """A second opinion of the compiler, without messages: what it schedules by."""
    total, copies, seconds = found["cycles"], found["copy_cycles"], found["cycle_seconds"]
    told = f" ({_ms(seconds)})" if seconds else ""
    share = f", {copies / total:.0%} of them in copies to another layout" if total else ""
    return f"{total / 1e6:.3g} million in the operations by themselves, messages left out{told}{share}"


def _compiled(found: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    when = " (kept from before)" if found["from_cache"] else ""
    return f"in {found['compile_seconds']:.0f} s, {found['cpu_seconds']:.0f} s of a core{when}, by {versions}"


def _collectives(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"{'collective':<19} {'axes':<38} {'of':>5} {'messages':>8} {'size':>10} {'sent':>10}"]
    for row in rows:
        lines.append(
            f"{row['kind']:<19} {row['axes']:<38} {row['members']:>5} {row['messages']:>8} "
            f"{format_bytes(row['bytes']):>10} {format_bytes(row['sent']):>10}"
        )
    return lines if rows else ["no collectives"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"
