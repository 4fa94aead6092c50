"""What `podscale tpu compile` tells a person."""

from collections.abc import Mapping, Sequence
from typing import Any

from podscale.util.formatting import format_bytes, format_count

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
            f"{topology['name']}: {format_count(topology['chips'], 'chip')}, {format_count(topology['devices'], 'device')}",
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
        f"{found['weight_update']} update, {found['all_reduce']}: {format_count(found['batch'], 'image')} {_rank_description(found)}, "
        f"{found['global_batch']:,} in all"
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
