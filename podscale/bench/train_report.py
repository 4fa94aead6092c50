"""Markdown report of `podscale bench train`, with published rates for comparison."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podscale.bench.input_headroom import format_rate
from podscale.bench.kernel_classes import KernelTotal, add_counted_bytes, combine_totals, format_totals, operator_class
from podscale.bench.sweep import SweepRow
from podscale.hardware import find_gpu_chip
from podscale.util import host_info
from podscale.util.files import write_atomically
from podscale.util.formatting import format_bytes


@dataclass(frozen=True)
class ReferenceRates:
    """Rates of ResNet-50 at 224 px per GPU to compare with, images/s: a published one, and our milestones."""

    published: float
    source: str
    milestones: tuple[int, ...]


REFERENCE_RATES = {
    "H200": ReferenceRates(
        7960.0, "NVIDIA, MXNet, MLPerf v4.0, 8 devices with their communication", (5500, 7000, 8000, 9500)
    ),
    "H100": ReferenceRates(
        7000.0, "NVIDIA, MXNet, MLPerf v3.1, about: 8 devices with evaluation", (5000, 6000, 7000, 8000)
    ),
}
"""By chip of `hardware.gpus`. NVIDIA's H100 took 13.34 minutes for 35 epochs."""
REAL_FRACTION = 0.98
"""Goal for real images, as a fraction of the synthetic rate."""

LONGEST_KERNELS = 25
"""Kernels of a profile that are listed by name."""
KERNEL_NAME_LENGTH = 90
"""Characters of a kernel's name in the report."""

TABLE_HEADER = (
    "| variant | images | batch | images/s | MFU | ms a step: median, p95 | forward | backward | all-reduce shown "
    "| optimizer | data wait | memory | first step |"
)
TABLE_RULE = "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"


def write_report(path: Path, command: str, rows: Sequence[SweepRow]) -> None:
    write_atomically(path, "\n".join([*format_report(command, rows), ""]))


def format_report(command: str, rows: Sequence[SweepRow]) -> list[str]:
    """Format conditions, table, ratios and failed variants."""
    measured = [row for row in rows if row.found]
    lines = ["# Training throughput", "", *_conditions(command, measured), "", TABLE_HEADER, TABLE_RULE]
    lines += [_format_row(row) for row in measured]
    lines += ["", *_conclusions(measured)]
    for row in measured:
        lines += _kernel_tables(row)
    if failed := [row for row in rows if not row.found]:
        lines += ["", "Not measured:", "", "| variant | seconds | reason |", "|---|---:|---|"]
        lines += [f"| {row.name} | {row.seconds:.0f} | {row.reason.replace('|', '/')} |" for row in failed]
    return lines


def _conditions(command: str, measured: Sequence[SweepRow]) -> list[str]:
    devices = sorted({_result(row)["device"] for row in measured}) or ["nothing was measured"]
    versions = {f"{name} {version}" for row in measured for name, version in _result(row)["versions"].items()}
    ranks = sorted({_result(row)["ranks"] for row in measured})
    models = sorted({f"{_option(row, 'model.name')} at {_option(row, 'input.image_size')} px" for row in measured})
    lines = [
        f"Command: `{command}`  ",
        f"Device: {', '.join(devices)}; ranks: {', '.join(map(str, ranks))}; "
        f"{host_info.cpu_count()} cores of {host_info.cpu_name()}  ",
        f"Model: {', '.join(models)}  ",
        f"Versions: {', '.join(sorted(versions))}  ",
        f"Date: {time.strftime('%Y-%m-%d')}",
        "",
        "Images/s are per rank, over steps in which the host does not wait for the device; collectives, optimizer and",
        "input are included. Times of parts are device times of ordinary steps, ms (a CUDA graph does not show them).",
        "MFU counts 2 FLOP per multiply-add of convolutions and linear layers, forward and backward, over dense peaks:",
    ]
    for name in devices:
        chip = find_gpu_chip(name)
        peaks = f"fp32 {chip.fp32:g}, fp16 {chip.fp16:g}, bf16 {chip.bf16:g} TFLOP/s" if chip else "peaks unknown"
        lines.append(f"{name}: {peaks}.")
    return lines


def _format_row(row: SweepRow) -> str:
    result = _result(row)
    parts = ("forward", "backward", "allreduce_wait", "optimizer")
    cells = [
        row.name,
        row.key["images"],
        str(result["batch"]),
        format_rate(_row_rate(row)),
        _mfu(row),
        f"{_ms(result['step_median_seconds'])}, {_ms(result['step_p95_seconds'])}",
        *(_ms(result["part_seconds"].get(name)) for name in parts),
        _ms(result["host_seconds"].get("data_wait", 0.0)),
        format_bytes(result["memory_bytes"]),
        f"{result['first_step_seconds']:.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


def _kernel_tables(row: SweepRow) -> list[str]:
    """Return the kernels of a profiled step by class, with the bytes that were counted, and the longest ones."""
    result = _result(row)
    kernels = [KernelTotal(**kernel) for kernel in result.get("kernels", [])]
    sizes: dict[str, float] = result.get("counted_bytes", {})
    total_bytes = sum(sizes.values()) or result.get("compiled_bytes", 0)
    if not kernels and not total_bytes:
        return []
    classes, chip = combine_totals(kernels), find_gpu_chip(result["device"])
    bandwidth = chip.memory_bandwidth if chip else 0.0
    busy, step = sum(total.seconds for total in classes), result["step_median_seconds"]
    lines = ["", f"## Kernels of a step: {row.name}", ""]
    if kernels:
        lines.append(f"Kernels take {busy * 1e3:.1f} ms of a step's {step * 1e3:.1f} ms.")
    if total_bytes:
        lines += _counted_sentences(total_bytes, bandwidth, is_compiled=not sizes)
    if sizes:
        classes = add_counted_bytes(classes, sizes, by=operator_class)
        own = {name: size for name, size in sizes.items() if "::" not in name}
        names = {kernel.name for kernel in kernels}
        kernels = add_counted_bytes(kernels, {name: own[name] for name in own if name in names}, by=str)
    options: dict[str, Any] = {"bandwidth": bandwidth, "is_counted": bool(sizes)}
    if classes:
        lines += ["", *format_totals(classes, **options)]
    if kernels:
        shortened = [_shortened(kernel) for kernel in kernels]
        lines += ["", *format_totals(shortened, title="longest kernels", longest=LONGEST_KERNELS, **options)]
    return lines


def _counted_sentences(size: float, bandwidth: float, *, is_compiled: bool) -> list[str]:
    """Return where the count of bytes is from, and the least time that they take."""
    least = f", at least {size / bandwidth / 1e6:.1f} ms at {bandwidth:,.0f} GB/s" if bandwidth else ""
    if is_compiled:
        return [f"Inductor counts {size / 1e9:.1f} GB for forward and backward{least}."]
    return [
        f"It moves {size / 1e9:.1f} GB{least}. Bytes are counted from the tensors of an ordinary step's operators and",
        "kernels (ncu measures them); kernels in which cuDNN changes a layout have none.",
    ]


def _shortened(kernel: KernelTotal) -> KernelTotal:
    name = kernel.name if len(kernel.name) <= KERNEL_NAME_LENGTH else f"{kernel.name[: KERNEL_NAME_LENGTH - 1]}…"
    return replace(kernel, name=f"`{name}`")


def _mfu(row: SweepRow) -> str:
    chip = find_gpu_chip(_result(row)["device"])
    peak = chip.peak_tflops(_option(row, "train.precision")) if chip else 0.0
    return f"{_row_rate(row) * _result(row)['training_flops_per_image'] / (peak * 1e12):.1%}" if peak else ""


def _conclusions(measured: Sequence[SweepRow]) -> list[str]:
    """Return sentences that compare the rows."""
    lines = [
        f"`{row.name}` chose by measurements: {event}: {', '.join(f'{name} {fact}' for name, fact in facts.items())}."
        for row in measured
        for event, facts in _result(row).get("choices", {}).items()
    ]
    synthetic = [row for row in measured if row.key["images"] == "synthetic"]
    if best := max(synthetic, key=_row_rate, default=None):
        lines.append(f"Fastest with synthetic images: {best.name}, {_row_rate(best):,.1f} images/s.")
        chip = find_gpu_chip(_result(best)["device"])
        reference = REFERENCE_RATES.get(chip.name) if chip else None
        if chip and reference and _option(best, "model.name") == "resnet50":
            passed = [str(mark) for mark in reference.milestones if _row_rate(best) >= mark]
            lines.append(
                f"That is {_row_rate(best) / reference.published:.2f} of the best published rate per {chip.name} "
                f"({reference.published:,.0f}: {reference.source}). "
                f"Milestones {', '.join(map(str, reference.milestones))}: passed {', '.join(passed) or 'none'}."
            )
    for row in measured:
        if row.key["images"] == "real" and (twin := _comparable_row(row, synthetic, "input.loader", "input.workers")):
            fraction = _row_rate(row) / _row_rate(twin)
            lines.append(
                f"Real images reach {fraction:.1%} of the synthetic rate (goal {REAL_FRACTION:.0%}): `{row.name}`."
            )
    fp32 = [row for row in synthetic if _option(row, "train.precision") == "fp32"]
    for row in synthetic:
        if row not in fp32 and (twin := _comparable_row(row, fp32, "train.precision")):
            lines.append(
                f"{_row_rate(row) / _row_rate(twin):.2f} times the rate of fp32, all else alike: `{row.name}`."
            )
    return lines


def _comparable_row(row: SweepRow, others: Sequence[SweepRow], *options: str) -> SweepRow | None:
    """Return the first of `others` that differs from `row` in at most these options."""
    ignored = dict.fromkeys(options)
    return next((other for other in others if {**other.options, **ignored} == {**row.options, **ignored}), None)


def _result(row: SweepRow) -> dict[str, Any]:
    assert row.found is not None
    return row.found


def _row_rate(row: SweepRow) -> float:
    return float(_result(row)["images_per_second"])


def _option(row: SweepRow, name: str) -> str:
    return str(row.options.get(name, ""))


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
