"""Report of `podscale tpu compile`: step time by the compiler's cost model, bounds by the peaks of the chip, memory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from podscale.hardware import Topology
from podscale.jax.aot.hlo import NETWORK_AXIS, find_collectives, find_cycles, summarise_collectives
from podscale.jax.aot.request import CompileRequest, CompileResult
from podscale.util.formatting import format_bytes, format_count

MATMUL_PASSES = {"fp32": 6}
"""bf16 products per exact fp32 product on a TPU (XLA's precision HIGHEST; a 3 x 3 convolution compiled so by libtpu
0.0.42.1 has 5.2 times the cycles on v5e and 5.6 on v3); 1 for other precisions. XLA's count of operations omits it."""


@dataclass(frozen=True)
class StepBounds:
    """Lower bounds of a step's seconds.

    Args:
        compute: floating-point operations at the peak rate.
        memory: bytes that operations read and write, as if nothing stayed on the chip between them.
        links: bytes that a chip sends to its neighbours, over all its links at once; if it has two devices, messages
            between these count as well, so that the bound is up to twice too high.
        network: bytes that it sends between slices; 0 if the rate is not known.
    """

    compute: float
    memory: float
    links: float
    network: float

    @property
    def binding(self) -> str:
        """Name of the largest bound."""
        values = asdict(self)
        return max(values, key=lambda name: values[name])

    @property
    def seconds(self) -> float:
        """The largest bound."""
        return float(max(asdict(self).values()))


@dataclass(frozen=True)
class DeviceWork:
    """Work of one device in one step; `bytes_sent` counts messages inside the slice."""

    flops: float
    bytes: float
    bytes_sent: float
    bytes_between_slices: float


def compute_bounds(work: DeviceWork, topology: Topology, precision: str) -> StepBounds:
    """Return the bounds of a device's work; the devices of a chip share its rates."""
    chip, devices = topology.chip, topology.chip.devices
    network = work.bytes_between_slices / (chip.network_bandwidth * 1e9 / devices) if chip.network_bandwidth else 0.0
    return StepBounds(
        compute=work.flops * MATMUL_PASSES.get(precision, 1) / (chip.bf16_tflops * 1e12 / devices),
        memory=work.bytes / (chip.memory_bandwidth * 1e9 / devices),
        links=work.bytes_sent / (chip.link_bandwidth * 1e9 / devices),
        network=network,
    )


def estimate_step_seconds(cost_model: float | None, bounds: StepBounds) -> tuple[float, str]:
    """Return the seconds of a step and their source: `cost model`, or `roofline` if the cost model's are impossible.

    The seconds of `cost_model` are impossible below the time of the arithmetic at the peak rate. The other bounds may
    be too high, because they ignore what stays on the chip or overlaps.
    """
    if cost_model is not None and cost_model > bounds.compute > 0:
        return cost_model, "cost model"
    return bounds.seconds, "roofline"


def step_rates(seconds: float, global_batch: int, work: DeviceWork, topology: Topology) -> dict[str, Any]:
    """Return images/s of all devices and the fraction of the peak that a step of `seconds` reaches."""
    peak = topology.chip.bf16_tflops * 1e12 / topology.chip.devices
    return {"images_per_second": global_batch / seconds, "peak_share": work.flops / seconds / peak}


def build_report(request: CompileRequest, compiled: CompileResult) -> dict[str, Any]:
    """Return the report of a compiled step as JSON values: sizes in bytes of one device, times in seconds."""
    analysis, topology, train = compiled.analysis, request.topology, request.config.train
    report: dict[str, Any] = {
        "run": request.config.run.id,
        "topology": {
            "name": str(topology),
            "chips": topology.chip_count,
            "devices": topology.device_count,
            "mesh": analysis["mesh"],
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
        "fits": analysis["fits"],
        "memory": _memory_report(analysis, topology),
    }
    if analysis["fits"]:
        report |= _speed_report(request, compiled)
    times = {name: analysis[name] for name in ("trace_seconds", "compile_seconds", "cpu_seconds")}
    return {**report, **times, "from_cache": compiled.from_cache, "versions": compiled.versions}


def _memory_report(analysis: dict[str, Any], topology: Topology) -> dict[str, int]:
    """Return the device's memory: `hbm`, `available` to a program, and what is `free` of that or `over` it.

    The compiler reports `available` only if a program does not fit; else it is the chip's.
    """
    memory = {
        "hbm": round(topology.device_hbm_bytes),
        "available": round(topology.device_available_bytes),
        **analysis["memory"],
    }
    free = memory["available"] - memory["needed"]
    return {**memory, "free": free} if analysis["fits"] else {**memory, "over": -free}


def _speed_report(request: CompileRequest, compiled: CompileResult) -> dict[str, Any]:
    analysis = compiled.analysis
    collectives = find_collectives(compiled.text, analysis["mesh"])
    work = DeviceWork(
        analysis["flops"],
        analysis["bytes"],
        bytes_sent=sum(message.bytes_sent for message in collectives if message.axes != NETWORK_AXIS),
        bytes_between_slices=sum(message.bytes_sent for message in collectives if message.axes == NETWORK_AXIS),
    )
    bounds = compute_bounds(work, request.topology, request.config.train.precision)
    cycles, clock = find_cycles(compiled.text), request.topology.chip.clock_ghz
    seconds, source = estimate_step_seconds(analysis["optimal_seconds"], bounds)
    return {
        "collectives": summarise_collectives(collectives),
        "flops": work.flops,
        "bytes": work.bytes,
        "cost_model_seconds": analysis["optimal_seconds"],
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


def format_compile_report(report: Mapping[str, Any]) -> list[str]:
    topology = report["topology"]
    rows = [
        (
            "topology",
            f"{topology['name']}: {format_count(topology['chips'], 'chip')}, "
            f"{format_count(topology['devices'], 'device')}",
        ),
        ("mesh", ", ".join(f"{name} {size}" for name, size in topology["mesh"].items())),
        ("step", _step(report)),
        *([("phases", _phases(report["phases"]))] if "phases" in report else []),
        ("memory", _memory_rows(report)),
    ]
    if "largest" in report:
        rows.append(("largest", _largest(report)))
    if report["fits"]:
        rows += [("work", _work(report)), ("at least", _bounds(report)), ("estimate", _estimate(report))]
        rows.append(("cycles", _cycles(report)))
    rows.append(("compiled", _compiled(report)))
    lines = [f"{name:<10} {value}" for name, value in rows]
    if report["fits"]:
        lines += ["", *_collectives(report["collectives"])]
    return [*lines, "", CAVEAT]


def format_sweep_report(rows: Sequence[Mapping[str, Any]], largest: int) -> list[str]:
    """Format the batches that were tried, in ascending order, and the largest and fastest of them."""
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


def _step(report: Mapping[str, Any]) -> str:
    return (
        f"{report['model']} at {report['image_size']} px in {report['precision']}, {report['optimizer']}, "
        f"{report['weight_update']} update, {report['all_reduce']}: {format_count(report['batch'], 'image')} "
        f"{_rank_description(report)}, {report['global_batch']:,} in all"
    )


def _phases(phases: Sequence[Mapping[str, Any]]) -> str:
    """Format the batches of a run whose batch changes, and which of them was compiled."""
    parts = [
        f"{phase['global_batch']:,} from epoch {phase['epoch']:g}"
        + (f" in {phase['accumulation']} passes" if phase["accumulation"] > 1 else "")
        + ("" if phase["compiled"] else " (not compiled)")
        for phase in phases
    ]
    return f"{', '.join(parts)}; compiled is the largest pass"


def _memory_rows(report: Mapping[str, Any]) -> str:
    memory = report["memory"]
    needed = format_bytes(memory["needed"])
    usable = f"{format_bytes(memory['available'])} that a program may use of a device's {format_bytes(memory['hbm'])}"
    if not report["fits"]:
        return f"DOES NOT FIT: {needed} needed of {usable}: {format_bytes(memory['over'])} too much"
    return (
        f"fits: {needed} of {usable}; arguments {format_bytes(memory['arguments'])} (of which "
        f"{format_bytes(memory['aliased'])} become outputs), temporaries {format_bytes(memory['temporaries'])}"
    )


def _largest(report: Mapping[str, Any]) -> str:
    """Format the largest batch that fits, and the basis of that answer."""
    largest, holder = report["largest"], _rank_description(report)
    batch, of = largest["batch"], largest["of"]
    text = f"{format_count(batch, 'image')} {holder}, {largest['global_batch']:,} in all"
    if largest["basis"] == "compiled":
        if not batch:
            return f"no batch fits: not {format_count(of[0], 'image')} {holder}, the smallest that the document allows"
        if len(of) == 1:
            return f"{text}: fits, and no larger one is allowed or tried (compiled)"
        return f"{text}: fits, and {of[1]} do not (both compiled)"
    if not batch:
        text = "no batch that the document allows"
    estimate = f"memory for about {format_count(largest['images'], 'image')}"
    how = (
        f"by a line through the memory of {of[0]} and {of[1]}"
        if largest["basis"] == "line"
        else f"by this step alone, whose {'temporaries are' if report['fits'] else 'memory is'} taken to grow evenly"
    )
    more = "; more may fit, because the compiler recomputes values if memory is short" if report["fits"] else ""
    return f"{text}, an ESTIMATE (exactly: --sweep batch)\n{'':<10} {estimate}, {how}{more}"


def _rank_description(report: Mapping[str, Any]) -> str:
    mesh = report["topology"]["mesh"]
    devices = mesh["height"] * mesh["width"]
    return "a device" if devices == 1 else f"for each {devices} devices"


def _work(report: Mapping[str, Any]) -> str:
    return f"{report['flops'] / 1e12:.3g} TFLOP and {report['bytes'] / 1e9:.3g} GB read and written, a device"


def _bounds(report: Mapping[str, Any]) -> str:
    parts = [f"{_ms(value)} for {BOUND_NAMES[name]}" for name, value in report["bound_seconds"].items() if value]
    return f"{', '.join(parts)}; {BOUND_NAMES[report['binding']]} binds"


def _estimate(report: Mapping[str, Any]) -> str:
    source = "the compiler's cost model"
    if report["step_source"] == "roofline":
        milliseconds = report["cost_model_seconds"] * 1e3
        source = f"the largest bound, because the cost model's {milliseconds:,.1f} ms is impossible"
    return (
        f"{_ms(report['step_seconds'])} a step ({source}): {report['images_per_second']:,.0f} images/s, "
        f"{report['peak_share']:.0%} of the chips' peak"
    )


def _cycles(report: Mapping[str, Any]) -> str:
    """Format the cycles that the compiler schedules by, without messages."""
    total, copies, seconds = report["cycles"], report["copy_cycles"], report["cycle_seconds"]
    time = f" ({_ms(seconds)})" if seconds else ""
    share = f", {copies / total:.0%} of them in copies to another layout" if total else ""
    return f"{total / 1e6:.3g} million in the operations by themselves, messages left out{time}{share}"


def _compiled(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    when = " (from the cache)" if report["from_cache"] else ""
    return f"in {report['compile_seconds']:.0f} s, {report['cpu_seconds']:.0f} s of a core{when}, by {versions}"


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
